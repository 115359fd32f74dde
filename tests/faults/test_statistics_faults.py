"""No leak of test data, no trace of sampling and evaluation, no noise at evaluation, metrics on odd numbers."""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
from pathlib import Path

import numpy as np
import pandas as pd
import program
import pytest
import torch

from jemlib import calibration, data, detection, evaluation, exact, training
from jemlib.checkpoints import load_checkpoint
from jemlib.config import TrainConfig
from jemlib.data import Labelled
from jemlib.energy import JEM
from jemlib.nets import conv_net
from jemlib.sampler import ReplayBuffer, sgld

# --- test data ----------------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    head = struct.pack(">HBB", 0, 8, array.ndim) + b"".join(struct.pack(">I", n) for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


def small_mnist(folder: Path, root: Path, poison: bool) -> Path:
    """Files in MNIST's form, whose sums the copy of the program takes for the original ones; poison: the test files."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    source = (root / "jemlib" / "data.py").read_text()
    for part, n in (("train", 400), ("t10k", 100)):
        rng = np.random.default_rng(n)
        y = np.arange(n) % 10
        x = rng.integers(0, 60, (n, 28, 28)) + (np.arange(28) // 3 == y[:, None, None]) * 180
        if poison and part == "t10k":
            x, y = rng.integers(0, 256, x.shape), (y + 3) % 10
        for file, array in ((f"{part}-images-idx3-ubyte", x), (f"{part}-labels-idx1-ubyte", y)):
            (raw / file).write_bytes(idx(array))
            original = data._IDX_SHA256["MNIST"][file]
            source = source.replace(original, hashlib.sha256(idx(array)).hexdigest())
    (root / "jemlib" / "data.py").write_text(source)
    return folder


TINY = {
    "methods": "softmax,jem,st_jem", "run_grid": True, "n_train": 300, "n_val": 100, "n_test": 0, "n_iterations": 4,
    "batch_size": 16, "decay_at": 3, "warmup": 1, "n_steps": 2, "buffer_size": 100, "n_fresh": 80, "fresh_steps": 2,
    "judge_iterations": 6, "log_every": 2, "width": 4,
}  # fmt: skip


@pytest.mark.timeout(600)
def test_a_poisoned_test_set_changes_no_weight_and_no_choice(tmp_path, gets):
    found = {}
    for kind in ("clean", "poisoned"):
        root = program.copy(tmp_path / kind)
        place = small_mnist(tmp_path / kind / "data", root, poison=kind == "poisoned")
        program.smoke_with(root, "02_mnist", **TINY)
        out = tmp_path / kind / "out"
        done = program.study(root, "--profile", "smoke", "--only", "02", "--data", str(place), "--out", str(out))
        assert done.code == 0, done.err
        runs = {}
        for path in out.glob("runs/*.json"):
            record = json.loads(path.read_text())
            state = load_checkpoint(out / "checkpoints" / f"{record['run']}.pt")
            runs[json.dumps(record["config"], sort_keys=True)] = state["model"], state["buffer"], record["history"]
        tables = {name: pd.read_csv(out / "tables" / f"{name}.csv") for name in ("mnist_grid", "mnist_methods")}
        found[kind] = runs, tables
    (runs, tables), (others, other_tables) = found.values()
    assert runs.keys() == others.keys() and len(runs) >= 10
    for key in runs:
        for a, b in zip(runs[key][:2], others[key][:2], strict=True):
            assert (a is b is None) or all(torch.equal(a[name], b[name]) for name in a if torch.is_tensor(a[name]))
        assert runs[key][2] == others[key][2]
    grid, other_grid = (some["mnist_grid"].drop(columns="run") for some in (tables, other_tables))
    pd.testing.assert_frame_equal(grid, other_grid)
    assert not tables["mnist_methods"]["nll"].equals(other_tables["mnist_methods"]["nll"]), "the poison was not read"
    gets("poisoned test set", f"the same weights, chains and choices in {len(runs)} runs; other test results", 0)


# --- what sampling and evaluation leave behind --------------------------------------------------------------


@pytest.fixture
def model():
    """A network with batch norm and dropout, in train mode, one weight frozen, one module in eval mode."""
    torch.manual_seed(0)
    net = conv_net(3, channels=1, size=16, width=4)
    odd = [torch.nn.BatchNorm2d(1), torch.nn.Dropout(0.5)]
    found = JEM(torch.nn.Sequential(*odd, *net)).train()
    found.backbone[0].weight.requires_grad_(False)
    found.backbone[1].eval()
    return found


def trace(model: JEM) -> list:
    """All that must stay: weights and running statistics, modes, flags, gradients, and every random stream."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes, flags = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002  the global stream is what is watched
    streams = [torch.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), rest]
    return [state, modes, flags, [p.grad for p in model.parameters()], streams, torch.is_grad_enabled()]


CONFIG = TrainConfig(method="st_jem", n_iterations=1, noise_std=0.01, n_steps=2, input_noise=0.5)
X = torch.rand(40, 1, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
Y = torch.arange(40) % 3


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


LEAVE_NO_TRACE = {
    "sgld": lambda m: sgld(m, X, Y, n_steps=3, step_size=0.1, generator=rng()),
    "fresh chains": lambda m: evaluation.fresh_chains(m, CONFIG, Y, (1, 16, 16), n_steps=2, seed=0),
    "classification": lambda m: evaluation.classification(m, Labelled(X, Y)),
    "features": lambda m: evaluation.features(m, X),
    "OOD scores": lambda m: detection.scores(m, X),
    "class agreement": lambda m: evaluation.class_agreement(m, X, Y),
    "validation": lambda m: evaluation.validation(Labelled(X, Y))(m),
    "the buffer": lambda m: ReplayBuffer.uniform(9, (2,), generator=rng()).draw(4, reinit_prob=0.5, generator=rng()),
    "building a model": lambda m: training.build_model(CONFIG, (1, 16, 16), 3),
    "fit": lambda m: training.fit(CONFIG.replace(batch_size=8, buffer_size=8), Labelled(X, Y), 3),
}


def test_sampling_and_evaluation_leave_no_trace(model, gets):
    for name, use in LEAVE_NO_TRACE.items():
        before, x, y = trace(model), X.clone(), Y.clone()
        use(model)
        after = trace(model)
        assert all(torch.equal(before[0][key], after[0][key]) for key in before[0]), name
        assert before[1:] == after[1:], name
        assert torch.equal(x, X) and torch.equal(y, Y), name
    gets("sampling and evaluation on a network in train mode", "modes, flags, statistics, random streams as before")


def test_an_error_in_the_middle_leaves_no_trace(model, gets):
    before = trace(model)
    for use in (evaluation.predict, detection.scores):
        with pytest.raises(RuntimeError):
            use(model, torch.zeros(2, 5, 16, 16))  # channels that the network does not take
    with pytest.raises(RuntimeError):
        sgld(model, torch.zeros(2, 5, 16, 16), n_steps=1, step_size=0.1, generator=rng())
    assert before[1:] == trace(model)[1:]
    gets("an error inside sampling or evaluation", "modes, flags, random streams as before")


def test_evaluation_adds_no_noise(gets):
    result = training.fit(CONFIG.replace(batch_size=8, buffer_size=8, width=4), Labelled(X, Y), 3)
    with torch.no_grad():
        logits = result.model.eval().logits(X)
    assert torch.allclose(evaluation.predict(result.model, X), logits, atol=1e-5)
    both = [evaluation.classification(result.model, Labelled(X, Y)) for _ in range(2)]
    assert both[0] == both[1]
    assert both[0]["accuracy"] == (logits.argmax(1) == Y).double().mean().item()
    gets("input noise 0.5 in training", "evaluation on the images as they are, twice the same numbers")


# --- metrics ------------------------------------------------------------------------------------------------


class Fixed(torch.nn.Module):
    """Gives logits that were set beforehand."""

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.bias, self.fixed = torch.nn.Parameter(torch.zeros(1)), logits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fixed[: len(x)] + self.bias


def test_nan_logits_are_never_right(gets):
    logits = torch.full((4, 3), math.nan)
    logits[0] = torch.tensor([5.0, 0.0, 0.0])
    model = JEM(Fixed(logits))
    found = evaluation.classification(model, Labelled(torch.zeros(4, 1), torch.zeros(4, dtype=torch.long)))
    assert found["accuracy"] == 0.25 and math.isnan(found["nll"]), "argmax of nan is 0, the label of all"
    assert evaluation.class_agreement(model, torch.zeros(4, 1), torch.zeros(4, dtype=torch.long)) == 0.25
    gets("nan logits, the label that argmax gives them", "not counted as right; nll nan")


def test_samples_that_are_not_finite_have_no_distance(gets):
    torch.manual_seed(0)
    judge = JEM(conv_net(3, channels=1, size=16, width=4, features=8))
    reference = evaluation.features(judge, X)
    samples = X.clone()
    samples[3] = math.nan
    found = evaluation.samples_metrics(judge, Labelled(samples, Y), reference)
    assert math.isnan(found["frechet"]) and found["n_frechet"] == 0 and 0 <= found["class_agreement"] < 1
    gets("a sample that is nan", "frechet nan of 0 samples; the table keeps its row")


REFUSED = {
    "calibration of nan logits": lambda: calibration.metrics(torch.full((3, 2), math.nan), torch.zeros(3).long()),
    "calibration of no data": lambda: calibration.fit_temperature(torch.empty(0, 2), torch.empty(0).long()),
    "reliability of a nan confidence": lambda: calibration.reliability([0.5, math.nan], [1, 0]),
    "AUROC with a nan score": lambda: detection.rates([1.0, math.nan], [0.0]),
    "AUROC of one class": lambda: detection.rates([1.0, 2.0], []),
    "Frechet distance with n below the features": lambda: evaluation.frechet_distance(X[:5, 0, 0], X[:5, 0, 0]),
    "Frechet distance of nan features": lambda: evaluation.frechet_distance(0 * X[:9, 0, 0, :2] / 0, X[:9, 0, 0, :2]),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_metrics_refuse_what_they_cannot_measure(fault, gets):
    with pytest.raises(ValueError) as caught:
        REFUSED[fault]()
    assert "\n" not in str(caught.value)
    gets(fault, f"ValueError: {caught.value}")


def test_metrics_of_ties_and_one_class(gets):
    assert detection.rates([1.0] * 5, [1.0] * 7)["auroc"] == 0.5
    assert detection.rates([1.0] * 5, [1.0] * 7)["fpr95"] == 1.0
    equal = torch.zeros(6, 3)
    found = calibration.metrics(equal, torch.zeros(6, dtype=torch.long))
    assert found["ece"] == pytest.approx(2 / 3) and found["nll"] == pytest.approx(math.log(3))
    p = torch.full((4, 2), math.log(0.25), dtype=torch.float64)
    assert float(exact.kl(p, p, torch.zeros(4))) == pytest.approx(0)
    gets("all scores and logits tied; data of one class", "AUROC 0.5, FPR95 1, NLL log K, by their definitions")
