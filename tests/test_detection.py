"""Detection: golden cases of the rates, scores of single images, and the tables that are made of trained models."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from jemlib import calibration, detection, images, runs, trained
from jemlib import data as data_module
from jemlib.config import TrainConfig
from jemlib.data import Dataset, Labelled
from jemlib.detection import SCORES, rates, scores
from jemlib.energy import JEM
from jemlib.files import ResultsError
from jemlib.nets import conv_net, wide_resnet
from jemlib.ood import NotAvailable, ood_sets
from jemlib.results import Store


def test_golden_rates():
    apart = rates([3, 4, 5], [0, 1, 2])
    assert apart == {"auroc": 1.0, "auroc_se": 0.0, "aupr": 1.0, "fpr95": 0.0, "n_in": 3, "n_out": 3}
    swapped = rates([0, 1, 2], [3, 4, 5])
    assert swapped["auroc"] == 0.0 and swapped["fpr95"] == 1.0
    assert rates([1, 1], [1, 1, 1])["auroc"] == 0.5, "ties count one half"


def test_the_standard_error_of_an_auroc_is_the_spread_over_draws():
    draws = np.random.default_rng(0)
    found = [rates(draws.exponential(4, 100), draws.exponential(1, 150)) for _ in range(400)]
    spread = np.std([one["auroc"] for one in found])
    assert np.mean([one["auroc_se"] for one in found]) == pytest.approx(spread, rel=0.15)


def test_scores_near_98_are_ranked_as_they_are():
    rng = np.random.default_rng(0)
    inside, outside = 98 + 1e-9 * rng.random(50) + 1e-9, 98 + 1e-9 * rng.random(50)
    expected = (inside[:, None] > outside[None]).mean()
    assert rates(inside, outside)["auroc"] == pytest.approx(expected) and expected > 0.9
    assert rates([98.0 + 1e-12], [98.0])["auroc"] == 1
    assert rates(-1e-18 * np.arange(1, 5), -1e-18 * np.arange(5, 9))["auroc"] == 1


def test_rates_against_counting():
    rng = np.random.default_rng(1)
    inside, outside = rng.integers(0, 30, 200) + 8.0, rng.integers(0, 30, 150) + 0.0
    found = rates(inside, outside)
    wins = (inside[:, None] > outside[None]).mean() + 0.5 * (inside[:, None] == outside[None]).mean()
    assert found["auroc"] == pytest.approx(wins)
    passing = [np.mean(outside >= t) for t in np.unique(inside) if np.mean(inside >= t) >= 0.95]
    assert found["fpr95"] == min(passing)
    assert (found["n_in"], found["n_out"]) == (200, 150)
    mirrored = rates(-outside, -inside)
    assert mirrored["auroc"] == pytest.approx(found["auroc"]), "the sides' roles and the sign turn together"


def test_fpr_at_exactly_95_percent():
    assert rates(np.arange(1, 21), [0.5, 1.5, 2.5])["fpr95"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_raise(bad):
    for sides in (([1.0, bad], [0.0]), ([1.0], [bad])):
        with pytest.raises(ValueError, match="finite scores; 1 of"):
            rates(*sides)


@pytest.mark.parametrize("sides", [([], [1.0]), ([1.0], []), ([], [])])
def test_a_single_class_raises(sides):
    with pytest.raises(ValueError, match="both sides"):
        rates(*sides)


@pytest.fixture(scope="module", params=["conv_net", "wide_resnet"])
def model(request):
    torch.manual_seed(0)
    net = conv_net(10, channels=3, size=32) if request.param == "conv_net" else wide_resnet(10, width=1)
    return JEM(net)


@pytest.fixture(scope="module")
def x():
    return torch.rand(24, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_scores_are_what_they_say(model, x):
    found = scores(model, x)
    assert list(found) == list(SCORES)
    assert all(part.shape == (24,) and part.dtype == torch.float64 for part in found.values())
    logits = model.logits(x).detach().double()
    p = logits.softmax(1)
    assert torch.allclose(found["log_px"], -model.energy(x).detach().double(), atol=1e-5)
    assert torch.allclose(found["max_prob"], p.max(1).values.log())
    assert torch.allclose(found["neg_entropy"], (p * p.log()).sum(1))
    for i in range(3):
        one = x[i : i + 1].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(-model.energy(one).sum(), one)
        assert found["neg_grad_norm"][i].item() == pytest.approx(-gradient.norm().item(), rel=1e-4)


def test_batches_of_one_equal_one_batch(model, x):
    whole, single = scores(model, x, batch=24), scores(model, x, batch=1)
    for name in SCORES:
        assert torch.allclose(whole[name], single[name], rtol=1e-4, atol=1e-5)


def test_scoring_leaves_model_and_images_alone(model, x):
    model.train()
    before = x.clone()
    flags = [p.requires_grad for p in model.parameters()]
    scores(model, x)
    assert model.training and [p.requires_grad for p in model.parameters()] == flags == [True] * len(flags)
    assert torch.equal(x, before) and not x.requires_grad and all(p.grad is None for p in model.parameters())
    assert list(scores(model, x, ["log_px"])) == ["log_px"]
    with pytest.raises(ValueError, match="no score is called 'energy'"):
        scores(model, x, ["energy"])


def test_confident_scores_keep_their_ranks():
    logits = torch.tensor([[60.0, 0.0, 0.0], [80.0, 0.0, 0.0], [100.0, 0.0, 0.0]])
    assert (logits.double().softmax(1).max(1).values == 1).all(), "the probability itself rounds to 1"

    class Fixed(JEM):
        def logits(self, x):
            return logits[: len(x)] + 0 * x[:, :1]

    found = scores(Fixed(torch.nn.Linear(1, 1)), torch.zeros(3, 1), batch=3)
    for name in ("max_prob", "neg_entropy"):
        assert found[name][0] < found[name][1] < found[name][2] < 0


# --- tables of trained models -------------------------------------------------------------------------------


def pictures(n_train, n_val, n_test, name="CIFAR10"):
    generator = torch.Generator().manual_seed(0)
    parts = []
    for n in (n_train, n_val, n_test):
        y = torch.arange(n) % 2
        x = 0.2 * torch.randn(n, 3, 8, 8, generator=generator) + (y - 0.5)[:, None, None, None]
        parts.append(Labelled(x.clamp(-1, 1), y))
    return Dataset(name, "synthetic", "0" * 12, ("dark", "light"), *parts)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A results folder with two small runs, whose data come back as notebook 05 asks for them."""
    monkeypatch.setattr(images, "cifar10", lambda data_dir, n_train, n_val, n_test: pictures(n_train, n_val, n_test))
    store = Store(tmp_path / "results", "03_cifar10")
    options = {"width": 4, "n_iterations": 4, "batch_size": 8, "n_steps": 1, "noise_std": 0.01, "buffer_size": 8}
    names = [
        runs.train(store, pictures(40, 5, 5), TrainConfig(method=method, **options))[0]
        for method in ("softmax", "st_jem")
    ]
    store.table("cifar10_methods", pd.DataFrame({"run": names}))
    return store


def test_models_come_back_as_they_were_trained(results):
    found, missing = trained.read(results, ["mnist_methods", "cifar10_methods"], n_val=20, n_test=30)
    assert [one.name for one in found] == ["CIFAR10-softmax-s0", "CIFAR10-st_jem-s0"]
    assert len(missing) == 1 and "mnist_methods.csv" in missing[0]
    saved = torch.load(results.checkpoint_path(found[1].run), weights_only=True)["model"]
    assert all(torch.equal(value, saved[key]) for key, value in found[1].model.state_dict().items())
    assert not found[1].model.training and len(found[0].dataset.val.x) == 20 and found[0].dataset is found[1].dataset


def test_what_is_missing_is_named(results, monkeypatch):
    read = {"n_val": 20, "n_test": 30}
    first = results.read_table("cifar10_methods")["run"][0]
    results.checkpoint_path(first).unlink()
    found, missing = trained.read(results, ["cifar10_methods"], **read)
    assert len(found) == 1 and len(missing) == 1 and f"{first}.pt is missing" in missing[0]
    other = pictures(40, 20, 30)
    monkeypatch.setattr(images, "cifar10", lambda *_, **__: Dataset(**{**vars(other), "checksum": "1" * 12}))
    with pytest.raises(ResultsError, match=r"no trained model.*not those that it was trained on"):
        trained.read(results, ["cifar10_methods"], **read)
    with pytest.raises(ResultsError, match=r"no trained model.*mnist_methods\.csv"):
        trained.read(results, ["mnist_methods"], **read)


def test_tables(results, monkeypatch, tmp_path):
    monkeypatch.setattr(data_module, "repo_root", lambda: tmp_path)
    models, _ = trained.read(results, ["cifar10_methods"], n_val=20, n_test=30)
    table, curves = calibration.table(models, n_bins=5)
    columns = ["model", "data_source", "temperature", "accuracy", "nll", "brier", "ece", "ece_adaptive", "n"]
    assert set(columns) <= set(table) and len(table) == 4
    assert table["scaling"].tolist() == ["none", "temperature"] * 2 and (table["n"] == 30).all()
    counts = curves.groupby(["model", "scaling"])["count"].sum()
    assert (counts == 30).all()
    sets = {"CIFAR10": {**ood_sets(models[0].dataset, ["uniform"], 10, 0)}}
    sets["CIFAR10"] |= {"SVHN": NotAvailable("not here"), "CIFAR10": NotAvailable("it is the in-distribution set")}
    table, values = detection.table(models, sets, 12)
    columns = ["model", "in_dataset", "ood_dataset", "score", "auroc", "aupr", "fpr95", "n_in", "n_out"]
    assert set(columns) <= set(table) and len(table) == 2 * 3 * 4
    assert (table["n_in"] == 12).all() and set(table["n_out"]) == {0, 10}
    away = table[table["ood_dataset"] == "SVHN"]
    assert away["auroc"].isna().all() and (away["note"] == "not available: not here").all()
    assert list(values["CIFAR10-st_jem-s0"]) == ["CIFAR10", "uniform"]
    again, _ = detection.table(models, sets, 12)
    pd.testing.assert_frame_equal(table, again)


def test_claims_about_joint_models_follow_the_tables():
    about = {"in_dataset": "MNIST", "status": "ok", "auroc_se": 0.01}
    figures = {  # on three sets, and a fourth that was not available
        ("softmax", "log_px"): (0.5, 0.5, 0.5),
        ("softmax", "max_prob"): (0.9, 0.9, 0.2),
        ("st_jem", "log_px"): (0.8, 0.8, 0.99),
        ("st_jem", "max_prob"): (0.7, 0.79, 0.995),
    }
    detected = [
        about | {"model": m, "method": m, "score": score, "ood_dataset": other, "auroc": value}
        for (m, score), values in figures.items()
        for other, value in zip("abcd", (*values, float("nan")), strict=True)
    ]
    calibrated = [
        {"model": method, "method": method, "scaling": scaling, "ece": value}
        for scaling in ("none", "temperature")
        for method, value in (("softmax", 0.02), ("st_jem", 0.03 if scaling == "none" else 0.01))
    ]
    found = detection.claims(pd.DataFrame(calibrated), pd.DataFrame(detected))
    assert found["holds"].tolist() == [False, True, True, False]
    assert found["figures"].tolist() == [
        "ECE 0.0300 against 0.0200",
        "ECE 0.0100 against 0.0200, and softmax as trained 0.0200",
        "better on 1 of 3 sets, worse on 0; mean AUROC 0.863 against 0.828",  # 0.01 is within the errors
        "better on 1 of 3 sets, worse on 2 (a, b); mean AUROC 0.863 against 0.667",
    ]
