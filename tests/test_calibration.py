"""Calibration: golden cases, edges of bins, and a temperature that is found where it is known."""

import math

import numpy as np
import pytest
import torch

from jemlib import calibration
from jemlib.calibration import ece, fit_temperature, metrics, reliability


def test_golden_ece():
    assert ece([0.95, 1.0], [1, 0], n_bins=10) == pytest.approx(0.475)
    assert ece([0.95, 1.0], [1, 0], n_bins=10, adaptive=True) == pytest.approx((0.05 + 1) / 2)


def test_confidence_0_and_1_have_bins():
    bins = reliability([0.0, 1.0, 1.0], [0, 1, 1], n_bins=10)
    assert bins["count"].tolist() == [1, 2] and bins["low"].tolist() == [0, 0.9] and bins["high"].tolist() == [0.1, 1]
    assert ece([0.0, 1.0, 1.0], [0, 1, 1]) == 0
    assert ece([0.0, 1.0], [1, 0]) == 1


def test_edges_belong_to_the_bin_above_but_for_the_last():
    edges = np.arange(11) / 10
    bins = reliability(edges, np.ones(11), n_bins=10)
    assert bins["count"].tolist() == [1] * 9 + [2]
    assert (bins["low"] <= bins["confidence"]).all() and (bins["confidence"] <= bins["high"]).all()


def test_counts_are_complete_and_empty_bins_left_out():
    rng = np.random.default_rng(0)
    confidence, correct = rng.uniform(0.5, 1, 997), rng.integers(0, 2, 997)
    for adaptive in (False, True):
        bins = reliability(confidence, correct, 15, adaptive)
        assert bins["count"].sum() == 997 and (bins["count"] > 0).all()
        expected = (bins["confidence"] * bins["count"]).sum() / 997
        assert expected == pytest.approx(confidence.mean())
    assert len(reliability(confidence, correct, 10)) == 5
    counts = reliability(confidence, correct, 15, adaptive=True)["count"]
    assert len(counts) == 15 and counts.max() - counts.min() <= 1, "adaptive bins hold equally many"


def test_the_order_of_data_plays_no_part():
    rng = np.random.default_rng(0)
    confidence, correct = rng.choice([0.3, 0.7, 0.9, 1.0], 100, p=[0.1, 0.1, 0.1, 0.7]), rng.integers(0, 2, 100)
    order = rng.permutation(100)
    for adaptive in (False, True):
        first = ece(confidence, correct, 7, adaptive)
        assert first == pytest.approx(ece(confidence[order], correct[order], 7, adaptive), abs=1e-12)
    bins = reliability(confidence, correct, 7, adaptive=True)
    assert (bins["low"][1:].to_numpy() > bins["high"][:-1].to_numpy()).all(), "equal confidences share a bin"
    assert len(reliability([0.7] * 9, [1] * 9, 5, adaptive=True)) == 1


def test_ece_against_a_sum_by_hand():
    confidence, correct = [0.15, 0.18, 0.55, 0.52, 0.58, 0.91], [0, 1, 1, 1, 0, 1]
    by_hand = (2 * abs(0.5 - 0.165) + 3 * abs(2 / 3 - 0.55) + abs(1 - 0.91)) / 6
    assert ece(confidence, correct, 10) == pytest.approx(by_hand)
    assert ece(torch.tensor(confidence), torch.tensor(correct, dtype=torch.bool), 10) == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("confidence", "correct"),
    [([], []), ([0.5], [1, 0]), ([1.1], [1]), ([-0.1], [1]), ([math.nan], [1]), ([[0.5]], [[1]])],
)
def test_what_is_no_reliability_data(confidence, correct):
    with pytest.raises(ValueError):
        reliability(confidence, correct)
    with pytest.raises(ValueError, match="at least one bin"):
        reliability([0.5], [1], 0)


def test_brier_and_nll_by_hand():
    p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]], dtype=torch.float64)
    y = torch.tensor([0, 1])
    assert calibration.brier(p, y) == pytest.approx((0.09 + 0.04 + 0.01 + 0.01 + 0.81 + 0.64) / 2)
    assert calibration.nll(p.log(), y) == pytest.approx(-(math.log(0.7) + math.log(0.1)) / 2)
    found = metrics(p.log(), y)
    assert found["accuracy"] == 0.5 and found["n"] == 2 and found["temperature"] == 1
    assert found["ece"] == pytest.approx((abs(1 - 0.7) + abs(0 - 0.8)) / 2)


def sampled(temperature, n=20_000, scale=3.0):
    """Logits, and labels drawn from softmax(logits / temperature)."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(n, 10, generator=generator, dtype=torch.float64)
    y = torch.multinomial((logits / temperature).softmax(1), 1, generator=generator).squeeze(1)
    return logits, y


@pytest.mark.parametrize("temperature", [0.02, 0.4, 1.0, 3.0, 40.0])
def test_the_temperature_is_found(temperature):
    logits, y = sampled(temperature, scale=3 * temperature)
    found = fit_temperature(logits, y)
    assert found == pytest.approx(temperature, rel=0.05)
    before, after = metrics(logits, y), metrics(logits, y, found)
    assert after["nll"] <= before["nll"] + 1e-9 and after["ece"] < 0.02
    assert after["accuracy"] == before["accuracy"], "scaling changes no prediction"
    assert fit_temperature(logits.float(), y) == pytest.approx(found, rel=1e-4)


def test_temperatures_at_the_ends():
    logits = 10 * torch.eye(4)
    assert fit_temperature(logits, torch.arange(4)) < 0.1, "all right: as confident as can be"
    assert fit_temperature(logits, torch.tensor([1, 2, 3, 0])) > 100, "all wrong: as unsure as can be"
    extreme = 1e4 * torch.randn(200, 10, generator=torch.Generator().manual_seed(0))
    y = torch.arange(200) % 10
    found = metrics(extreme, y, fit_temperature(extreme, y))
    assert all(map(math.isfinite, found.values()))
    assert found["nll"] < metrics(extreme, y)["nll"]


@pytest.mark.parametrize("bad", [torch.empty(0, 3), torch.tensor([[1.0, math.inf]]), torch.tensor([[math.nan, 0.0]])])
def test_logits_that_cannot_be_scaled(bad):
    y = torch.zeros(len(bad), dtype=torch.long)
    for function in (fit_temperature, metrics):
        with pytest.raises(ValueError, match="finite logits"):
            function(bad, y)
