"""Properties of objectives, sampler, buffer and metrics, for whatever finite numbers hypothesis thinks of."""

from __future__ import annotations

import math

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jemlib import calibration, detection, evaluation, objectives
from jemlib.checks import Mixture
from jemlib.objectives import ANCHORS, METHODS, MIN_EXPONENT, loss
from jemlib.sampler import ReplayBuffer, sgld

QUICK = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
LIMIT = 1e4  # |E| at which training calls a run diverged


def table(rows: int, columns: int, limit: float = LIMIT):
    """A strategy of tensors (rows, columns) float64 in [-limit, limit]."""
    numbers = st.floats(-limit, limit, allow_subnormal=False)
    return arrays.arrays(np.float64, (rows, columns), elements=numbers).map(torch.from_numpy)


@st.composite
def batches(draw, limit: float = LIMIT):
    """(f_pos (B, K), y (B,), f_neg (M, K), y_neg (M,), a permutation of B, one of M)."""
    b, m, k = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(2, 4))
    labels = [torch.tensor(draw(st.lists(st.integers(0, k - 1), min_size=n, max_size=n))) for n in (b, m)]
    orders = [torch.tensor(draw(st.permutations(range(n)))) for n in (b, m)]
    return draw(table(b, k, limit)), labels[0], draw(table(m, k, limit)), labels[1], *orders


def value(name: str, f_pos, y, f_neg, y_neg) -> torch.Tensor:
    return loss(METHODS[name], f_pos, y, f_neg, y_neg)[0]


def close(a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-9 * scale)


# --- objectives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
@QUICK
@given(batch=batches(1e18))
def test_losses_metrics_and_gradients_are_finite(name, batch):
    f_pos, y, f_neg, y_neg, *_ = batch
    leaves = f_pos.requires_grad_(), f_neg.requires_grad_()
    total, metrics = loss(METHODS[name], leaves[0], y, leaves[1], y_neg)
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    assert torch.isfinite(total) and all(torch.isfinite(entry) for entry in metrics.values())
    assert all(torch.isfinite(gradient).all() for gradient in gradients if gradient is not None)


@pytest.mark.parametrize("name", METHODS)
@QUICK
@given(batch=batches())
def test_the_order_of_a_batch_changes_nothing(name, batch):
    f_pos, y, f_neg, y_neg, p, q = batch
    there = value(name, f_pos, y, f_neg, y_neg)
    assert close(there, value(name, f_pos[p], y[p], f_neg[q], y_neg[q]), LIMIT)


@pytest.mark.parametrize("name", METHODS)
@QUICK
@given(batch=batches(), shift=st.floats(-1e3, 1e3))
def test_a_shift_of_all_energies_changes_nothing(name, batch, shift):
    """E + c is the same density: log Z takes the constant up. Only the squared energies may feel it."""
    f_pos, y, f_neg, y_neg, *_ = batch
    assert close(value(name, f_pos, y, f_neg, y_neg), value(name, f_pos + shift, y, f_neg + shift, y_neg), LIMIT)


@QUICK
@given(batch=batches(), anchor=st.sampled_from(ANCHORS), exponent=st.just(0.0) | st.floats(MIN_EXPONENT, 1))
def test_importance_weights_sum_to_1(batch, anchor, exponent):
    f_pos, y, f_neg, *_ = batch
    terms = objectives.candidates(f_pos, f_neg, y, anchor).requires_grad_()
    phase = objectives.negative_phase(terms, exponent)
    (weights,) = torch.autograd.grad(phase.sum(), terms)
    assert torch.allclose(weights.sum(1), torch.ones(len(y), dtype=torch.float64)) and weights.min() >= 0
    assert (phase <= terms.amax(1) + 1e-6).all() and (phase >= terms.amin(1) - 1e-6).all()
    size = objectives.effective_samples(terms.detach(), exponent)
    assert (size >= 1 - 1e-9).all() and (size <= terms.shape[1] + 1e-9).all()


@QUICK
@given(batch=batches())
def test_mutual_information_lies_between_0_and_log_k(batch):
    f = torch.cat([batch[0], batch[2]])
    found = float(objectives.mutual_information(f))
    assert -1e-9 <= found <= math.log(f.shape[1]) + 1e-9


@QUICK
@given(batch=batches())
def test_the_anchored_loss_has_a_floor(batch):
    f_pos, y, f_neg, *_ = batch
    found = float(objectives.importance_weighted(f_pos, f_neg, y, anchor="batch"))
    assert found >= -math.log(len(f_pos) + len(f_neg)) - 1e-9


# --- sampler and buffer -------------------------------------------------------------------------------------

MIXTURE = Mixture([[-0.5, 0.2], [0.4, -0.3]], [0.4, 0.6], 0.3)


@QUICK
@given(
    x=table(4, 2, 1.0), step=st.floats(1e-6, 1e6), noise=st.floats(0, 1e3), n=st.integers(0, 4),
    how=st.sampled_from(["clamp", "reflect"]), bound=st.none() | st.floats(1e-3, 1.0), seed=st.integers(0, 99),
)  # fmt: skip
def test_chains_stay_finite_and_inside(x, step, noise, n, how, bound, seed):
    options = {"step_size": step, "noise_std": noise, "max_rms_step": bound, "at_bounds": how, "bounds": (-1.0, 1.0)}
    before = x.clone()
    moved, _ = sgld(MIXTURE, x, n_steps=n, **options, generator=torch.Generator().manual_seed(seed))
    assert torch.isfinite(moved).all() and moved.abs().max() <= 1
    assert torch.equal(x, before) and moved.data_ptr() != x.data_ptr()


@QUICK
@given(x=table(5, 2, 1.0), order=st.permutations(range(5)))
def test_chains_know_nothing_of_each_other(x, order):
    options = {"n_steps": 3, "step_size": 0.05, "noise_std": 0.0, "generator": torch.Generator()}
    whole, _ = sgld(MIXTURE, x, **options)
    assert torch.allclose(sgld(MIXTURE, x[list(order)], **options)[0], whole[list(order)])
    assert torch.allclose(sgld(MIXTURE, x[:1], **options)[0], whole[:1])


@QUICK
@given(size=st.integers(1, 12), share=st.floats(0, 1), seed=st.integers(0, 999), data=st.data())
def test_a_buffer_gives_distinct_chains_and_keeps_labels(size, share, seed, data):
    batch = data.draw(st.integers(1, size))
    generator = torch.Generator().manual_seed(seed)
    buffer = ReplayBuffer.uniform(size, (2,), n_classes=3, generator=generator)
    labels, before = buffer.y.clone(), buffer.x.clone()
    counts = torch.bincount(labels, minlength=3)
    assert counts.max() - counts.min() <= 1
    index, x, y = buffer.draw(batch, reinit_prob=share, generator=generator)
    assert len(set(index.tolist())) == batch and torch.equal(y, labels[index])
    assert torch.equal(buffer.x, before) and x.abs().max() <= 1
    buffer.put(index, torch.full_like(x, 0.5))
    others = torch.ones(size, dtype=torch.bool).index_fill(0, index, False)
    assert (buffer.x[index] == 0.5).all() and torch.equal(buffer.x[others], before[others])
    assert torch.equal(buffer.y, labels)
    again = ReplayBuffer.from_state(buffer.state_dict())
    assert torch.equal(again.x, buffer.x) and again.x.data_ptr() != buffer.x.data_ptr()


# --- metrics ------------------------------------------------------------------------------------------------

scores = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=12)


@QUICK
@given(inside=scores, outside=scores, seed=st.integers(0, 99))
def test_rates_are_shares_and_depend_on_ranks_alone(inside, outside, seed):
    rng = np.random.default_rng(seed)
    found = detection.rates(inside, outside)
    assert all(0 <= found[name] <= 1 for name in ("auroc", "aupr", "fpr95"))
    assert detection.rates(rng.permutation(inside), rng.permutation(outside)) == pytest.approx(found)
    rank = {score: i for i, score in enumerate(sorted({*inside, *outside}))}
    ranks = detection.rates([rank[score] for score in inside], [rank[score] for score in outside])
    assert ranks == pytest.approx(found)
    assert detection.rates(outside, inside)["auroc"] == pytest.approx(1 - found["auroc"])


@QUICK
@given(logits=table(6, 3), y=st.lists(st.integers(0, 2), min_size=6, max_size=6), order=st.permutations(range(6)),
       n_bins=st.integers(1, 20), shift=st.floats(-1e3, 1e3))  # fmt: skip
def test_calibration_lies_in_its_range_whatever_the_order(logits, y, order, n_bins, shift):
    labels = torch.tensor(y)
    found = calibration.metrics(logits, labels, 1.0, n_bins)
    assert all(map(math.isfinite, found.values()))
    assert all(0 <= found[name] <= 1 for name in ("accuracy", "ece", "ece_adaptive")) and found["nll"] >= 0
    assert 0 <= found["brier"] <= 2
    moved = calibration.metrics(logits[list(order)], labels[list(order)], 1.0, n_bins)
    assert moved == pytest.approx(found, abs=1e-9)
    assert calibration.nll(logits + shift, labels) == pytest.approx(found["nll"], abs=1e-6)


@QUICK
@given(a=table(8, 2, 10.0), b=table(7, 2, 10.0), shift=st.floats(-10, 10))
def test_frechet_distance_is_symmetric_and_0_for_equal_sets(a, b, shift):
    found = evaluation.frechet_distance(a, b)
    assert math.isfinite(found) and found >= -1e-6
    assert evaluation.frechet_distance(b, a) == pytest.approx(found, abs=1e-4)
    assert evaluation.frechet_distance(a, a.flip(0)) == pytest.approx(0, abs=1e-4)
    assert evaluation.frechet_distance(a + shift, b + shift) == pytest.approx(found, abs=1e-4)
