"""`python -m jemlib benchmark`: its table, its refusals, and the README's rendering of it."""

import subprocess

import pandas as pd
import pytest
import torch
from click.testing import CliRunner

from jemlib import benchmark, readme, savings, step_profile
from jemlib.checkpoints import CheckpointError
from jemlib.cli import main
from jemlib.data import DataError, Dataset, Labelled

CPU = torch.device("cpu")


@pytest.fixture
def tiny(monkeypatch):
    case = benchmark.CASES["MNIST net"]._replace(batch=4, n_steps=2, repeats=1)
    monkeypatch.setattr(benchmark, "CASES", {"MNIST net": case})
    monkeypatch.setattr(benchmark, "_GROWTH", {"batch": (2,), "width": (4, 8)})
    return case


def test_the_suite_writes_tables_that_the_readme_shows(tiny, tmp_path, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(benchmark, "_memory_elsewhere", lambda case, which, *a: {"ours": 1.0, "plain": 2.0}[which])
    done = CliRunner().invoke(main, ["benchmark", "--precision", "float32", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    table = pd.read_csv(tmp_path / "tables" / "benchmark.csv")
    assert list(table["what"]) == ["sgld step", "iteration"] and table.loc[1, "memory_ratio"] == 0.5
    assert (table[["ratio", "images_steps_per_s", "gflops", "share_of_peak"]] > 0).all(axis=None)
    growth = pd.read_csv(tmp_path / "tables" / "benchmark_growth.csv")
    assert {"batch", "width", "threads"} == set(growth["growing"]) and torch.get_num_threads() == before
    parts = pd.read_csv(tmp_path / "tables" / "benchmark_parts.csv").loc[0]
    shares = parts[[*step_profile.KINDS, "the rest"]].astype(float)
    assert shares.sum() == pytest.approx(1) and (shares > 0).all() and parts["precision"] == "float32"
    text = readme.render(tmp_path)
    assert "| MNIST net | iteration | 4 × 2 | float32 |" in text
    assert "| network | precision | convolutions | activations |" in text
    assert ("not measured yet" in text) == (not table["gpu"].any())


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--networks", "WRN-99-9"], "no network 'WRN-99-9'"), (["--threads", "0"], "threads")]
)
def test_mistakes_are_one_sentence(arguments, message):
    done = CliRunner().invoke(main, ["benchmark", *arguments])
    assert done.exit_code == 2 and message in done.output


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (DataError("MNIST is nowhere"), "Error: MNIST is nowhere"),
        (CheckpointError("a.pt is damaged"), "Error: a.pt is damaged"),
        (subprocess.CalledProcessError(3, "python", stderr="Traceback\nKilled"), "ended with exit code 3: Killed"),
        (subprocess.CalledProcessError(-9, "python", stderr=" "), "ended with exit code -9: it said nothing"),
    ],
)
def test_what_goes_wrong_is_one_sentence_and_data_are_looked_for_first(tmp_path, monkeypatch, raised, message):
    def fail(*_, **__):
        raise raised

    monkeypatch.setattr("jemlib.data.mnist", fail if isinstance(raised, DataError) else lambda *_, **__: "digits")
    suite = fail if isinstance(raised, subprocess.CalledProcessError) else lambda *_, **__: None
    monkeypatch.setattr(benchmark, "suite", pytest.fail if isinstance(raised, DataError) else suite)
    monkeypatch.setattr(savings, "compare", fail)
    done = CliRunner().invoke(main, ["benchmark", "--savings", "--out", str(tmp_path)])
    assert done.exit_code == 1 and message in done.output and len(done.output.splitlines()) == 1


def test_operations_are_those_of_the_network():
    """A convolution's count by hand: 2 x outputs x inputs of each; the input gradient costs as much again."""
    iteration = benchmark.Iteration(benchmark.CASES["toy MLP"], batch=8, n_steps=3, precision="float32", device=CPU)
    forward = 2 * 8 * (2 * 128 + 128 * 128 + 128 * 10)
    step, whole = iteration.flops()
    assert step == 2 * forward
    update = 2 * (3 * forward - 2 * 8 * 2 * 128)  # both halves of the batch; no gradient of the data themselves
    assert whole == 3 * step + update


@pytest.mark.slow
@pytest.mark.skipif(not benchmark._resident("VmRSS") > 0, reason="needs /proc")
def test_an_iteration_of_a_wide_resnet_needs_at_most_six_tenths_of_the_memory():
    case = benchmark.CASES["WRN-16-2"]._replace(batch=32)
    ours, plain = (benchmark._memory_elsewhere(case, which, "float32", CPU) for which in ("ours", "plain"))
    assert ours <= 0.6 * plain


def test_savings_have_a_row_a_variant_and_seed(tmp_path, monkeypatch):
    kept = {name: savings.VARIANTS[name] for name in ("two steps", "informative start, two steps")}
    monkeypatch.setattr(savings, "VARIANTS", kept)
    y = torch.arange(200) % 10
    part = Labelled(torch.rand(200, 1, 28, 28, generator=torch.Generator().manual_seed(0)) * 2 - 1, y)
    digits = Dataset("noise", "made", "0", tuple("0123456789"), part, part, part)
    store = benchmark.Store(tmp_path, "benchmark")
    table = savings.compare(store, digits, n_iterations=2, n_seeds=1, n_fresh=20, workers=1)
    assert list(table["chain_start"]) == ["uniform", "class_gaussians"] and set(table["n_steps"]) == {2}
    assert "| two steps | " in readme.render(tmp_path)
