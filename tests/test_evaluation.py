"""Evaluation against closed forms, and that it leaves no trace."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch

from jemlib import evaluation, runs
from jemlib.config import TrainConfig
from jemlib.data import Labelled
from jemlib.energy import JEM
from jemlib.nets import conv_net
from jemlib.training import FitResult, fit


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return JEM(conv_net(3, size=8, width=4, features=5))


def config(**changes):
    options = {"method": "st_jem", "n_iterations": 4, "batch_size": 8, "n_steps": 2, "buffer_size": 60, "width": 4}
    return TrainConfig(**(options | {"features": 5, "noise_std": 0.01, "log_every": 2} | changes))


def test_classification_of_known_logits():
    rows = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    data = Labelled(rows, torch.tensor([0, 1, 0]))
    model = JEM(torch.nn.Linear(2, 2, bias=False))
    torch.nn.init.eye_(model.backbone.weight)
    found = evaluation.classification(model, data)
    expected = [math.log1p(math.exp(-2)), math.log1p(math.exp(-1)), math.log1p(math.exp(3))]
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["nll"] == pytest.approx(sum(expected) / 3, rel=1e-6)


def test_predictions_do_not_depend_on_the_batch(model):
    x = torch.rand(37, 1, 8, 8)
    whole = evaluation.predict(model, x)
    assert torch.allclose(evaluation.predict(model, x, batch=1), whole, atol=1e-6)
    assert not whole.requires_grad


def test_frechet_distance_equals_the_definition():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(500, 6, generator=generator).double() @ torch.randn(6, 6, generator=generator).double()
    b = 0.5 + torch.randn(400, 6, generator=generator).double()
    c_a, c_b = np.cov(a.T), np.cov(b.T)
    root = scipy.linalg.sqrtm(c_a @ c_b).real
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum().item() + np.trace(c_a + c_b - 2 * root)
    assert evaluation.frechet_distance(a, b) == pytest.approx(expected, rel=1e-8)
    assert evaluation.frechet_distance(b, a) == pytest.approx(expected, rel=1e-8)
    assert evaluation.frechet_distance(a, a) == pytest.approx(0, abs=1e-8)
    assert evaluation.frechet_distance(a, a + 2) == pytest.approx(4 * 6, rel=1e-9), "a shift of 2 in 6 dimensions"


def test_frechet_distance_refuses_what_it_cannot_judge():
    enough = torch.randn(20, 6)
    with pytest.raises(ValueError, match="needs more samples, not 6"):
        evaluation.frechet_distance(torch.randn(6, 6), enough)
    with pytest.raises(ValueError, match="finite"):
        evaluation.frechet_distance(torch.full((20, 6), math.nan), enough)


def test_fresh_chains_are_deterministic_and_leave_no_trace(model):
    y = torch.arange(10) % 3
    model.train()
    torch.manual_seed(5)
    expected_draw = torch.rand(2)
    torch.manual_seed(5)
    first, _ = evaluation.fresh_chains(model, config(), y, (1, 8, 8), n_steps=3, seed=1, batch=4)
    assert torch.equal(torch.rand(2), expected_draw), "global randomness is untouched"
    assert model.training and all(p.requires_grad and p.grad is None for p in model.parameters())
    again, _ = evaluation.fresh_chains(model, config(), y, (1, 8, 8), n_steps=3, seed=1, batch=4)
    other, _ = evaluation.fresh_chains(model, config(), y, (1, 8, 8), n_steps=3, seed=2, batch=4)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.shape == (10, 1, 8, 8) and first.min() >= -1 and first.max() <= 1


def test_assess_a_run_with_and_without_a_sampler(model):
    generator = torch.Generator().manual_seed(0)
    train = Labelled(2 * torch.rand(60, 1, 8, 8, generator=generator) - 1, torch.arange(60) % 3)
    reference = evaluation.features(model, train.x)
    options = {"n_fresh": 30, "fresh_steps": 2, "seed": 0}
    rows = {}
    for method in ("softmax", "st_jem", "jem"):
        result = fit(config(method=method), train, 3, evaluate=evaluation.validation(train))
        assert {"val_accuracy", "val_nll"} <= result.history[-1].keys()
        rows[method], samples = evaluation.assess(result, train, model, reference, **options)
        assert (samples is None) == (method == "softmax")
        if samples is not None:
            assert evaluation.stored_chains(result).y.shape == (60,)
    assert rows["softmax"]["n_frechet"] == 0 and math.isnan(rows["softmax"]["class_agreement"])
    assert rows["st_jem"]["n_frechet"] == 30 and 0 <= rows["st_jem"]["class_agreement"] <= 1
    assert rows["st_jem"]["frechet"] > 0


def test_the_grid_prefers_survivors_then_the_smallest_distance(monkeypatch, model):
    outcomes = {"a": (9.0, None), "b": (4.0, None), "c": (1.0, 50), "d": (2.0, 10), "e": (1.0, 30)}
    methods = {"a": "jem", "b": "jem", "c": "jem", "d": "st_jem", "e": "st_jem"}

    def assess(result, *_, **__):
        name = result.status
        numbers = dict.fromkeys(("accuracy", "nll", "energy_gap", "class_agreement"), 0.0)
        method = {"method": methods[name], "steps": 1, "seed": 0, "status": name, "n_frechet": 9}
        return method | numbers | {"frechet": outcomes[name][0]}, None

    monkeypatch.setattr(evaluation, "assess", assess)
    kept = {}
    monkeypatch.setattr(runs, "add_metrics", lambda store, name, metrics: kept.update({name: metrics}))
    images = Labelled(torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.long))
    trained = [(name, FitResult(config(), model, None, name, outcomes[name][1], [])) for name in outcomes]
    grid = runs.sampler_grid(None, trained, images, model)
    assert grid.loc[grid["chosen"], "run"].tolist() == ["b", "e"]
    assert kept["a"]["validation"]["frechet"] == 9.0
