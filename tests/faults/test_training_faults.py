"""Absurd settings, broken data, kills, a full disk and strange checkpoints: a run ends as what it is."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pandas as pd
import program
import pytest
import torch
import train

from jemlib.checkpoints import load_checkpoint


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def same(a, b) -> bool:
    """Whether two states are equal bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


#: what two equal runs may differ in: times, and the commit, where somebody works on the repository meanwhile
NOT_COMPARED = {"seconds", "ms_per_step", "commit", "dirty"}


def outcome(folder: Path) -> dict[str, object]:
    """What a finished run left: its checkpoint (weights, chains, streams), its record, its table, its row of times."""
    found = load_checkpoint(only(folder, "checkpoints/*.pt"))
    found |= {f"record: {key}": value for key, value in json.loads(only(folder, "runs/*.json").read_text()).items()}
    found = {key: value for key, value in found.items() if key.removeprefix("record: ") not in NOT_COMPARED}
    timed = pd.read_csv(folder / "tables" / "timing.csv")["what"]
    return found | {"table": (folder / "tables" / "methods.csv").read_text(), "timed": list(timed)}


# --- settings and data --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["jem", "st_jem"])
def test_a_rate_of_10_and_a_step_of_1e6_end_as_diverged(copy, tmp_path, gets, method):
    settings = {"method": method, "lr": 10.0, "step_size": 1e6, "data": "images", "network": "conv_net", "width": 4}
    done = program.train(copy, tmp_path, **settings, n_iterations=300, checkpoint_every=2, log_every=2)
    assert done.code == 0, done.err
    row = pd.read_csv(tmp_path / "tables" / "methods.csv").iloc[0]
    assert row.status == f"diverged at step {row.diverged_at:.0f}" and row.diverged_at < 40
    state = load_checkpoint(only(tmp_path, "checkpoints/*.pt"))
    assert all(torch.isfinite(value).all() for value in state["model"].values())
    assert torch.isfinite(state["buffer"]["x"]).all() and state["buffer"]["x"].abs().max() <= 1
    assert state["step"] <= row.diverged_at and state["status"] == row.status
    gets(f"{method}: learning rate 10, step size 1e6", f"{row.status}; row kept, last checkpoint finite", done.code)


@pytest.mark.parametrize(
    ("fault", "settings", "sentence"),
    [
        ("NaN in one image", {"data": "images", "network": "conv_net", "fault": "nan"}, "must be finite"),
        ("batch larger than the data", {"batch_size": 300, "buffer_size": 300}, "larger than the 200 training data"),
        ("buffer smaller than the batch", {"buffer_size": 8}, "buffer_size 8 is smaller than batch_size 16"),
        ("-1 SGLD steps", {"n_steps": -1}, "n_steps: Input should be greater than or equal to 0"),
        ("a misspelt setting", {"learning_rate": 1}, "learning_rate"),
    ],
)
def test_what_cannot_be_trained_is_refused(copy, tmp_path, gets, fault, settings, sentence):
    done = program.train(copy, tmp_path, **({"method": "st_jem"} | settings))
    assert done.code == 1 and sentence in done.sentence
    assert not list(tmp_path.glob("runs/*")) and not list(tmp_path.glob("tables/methods.csv"))
    gets(fault, done.sentence, done.code)


@pytest.mark.parametrize(
    ("fault", "settings"),
    [
        ("K = 0 SGLD steps", {"n_steps": 0}),
        ("K = 1 SGLD step", {"n_steps": 1}),
        ("a class absent from the data", {"data": "images", "network": "conv_net", "fault": "absent class"}),
    ],
)
def test_what_is_odd_but_sound_is_trained(copy, tmp_path, gets, fault, settings):
    done = program.train(copy, tmp_path, **({"method": "st_jem", "n_iterations": 20} | settings))
    assert done.code == 0, done.err
    row = pd.read_csv(tmp_path / "tables" / "methods.csv").iloc[0]
    assert row.status == "ok" and all(map(pd.notna, (row.loss, row.energy_gap)))
    gets(fault, f"trained: {row.status}, energy gap {row.energy_gap:.3g}", done.code)


# --- kills --------------------------------------------------------------------------------------------------

LONG = {"method": "st_jem", "n_iterations": 100, "checkpoint_every": 5, "log_every": 10}
#: processes that find torch imported already: fifty starts would cost minutes
SPAWN = multiprocessing.get_context("forkserver")
SPAWN.set_forkserver_preload(["jemlib.runs", "jemlib.toy_runs"])


def started(folder: Path) -> multiprocessing.Process:
    """The training script as a process, started or going on."""
    process = SPAWN.Process(target=train.main, args=(str(folder), json.dumps(LONG)))
    process.start()
    return process


def finish(folder: Path) -> None:
    """Let a run come to its end."""
    process = started(folder)
    process.join()
    assert process.exitcode == 0


def kill_and_compare(tmp_path: Path, n: int) -> int:
    """Kill runs n times at random moments, finish each, compare each with an uninterrupted one; the number of runs."""
    finish(tmp_path / "first")  # which also imports
    begun = time.perf_counter()
    finish(tmp_path / "whole")
    takes = time.perf_counter() - begun
    rng, kills, n_runs = random.Random(0), 0, 0
    while kills < n:
        n_runs += 1
        folder = tmp_path / f"run {n_runs}"
        while kills < n:
            begun, how = time.perf_counter(), rng.choice([signal.SIGKILL, signal.SIGTERM])
            process = started(folder)
            process.join(rng.uniform(0, takes))  # the first moments, an iteration, a write: wherever it is then
            process.kill() if how == signal.SIGKILL else process.terminate()
            process.join()
            if process.exitcode != -how:
                takes = min(takes, time.perf_counter() - begun)  # it had ended: the machine is less busy now
                break
            kills += 1
        finish(folder)
        resumed, whole = outcome(folder), outcome(tmp_path / "whole")
        assert [key for key in whole if not same(resumed.get(key), whole[key])] == []
    return n_runs


def test_a_killed_run_is_finished_bit_for_bit(tmp_path, gets):
    kill_and_compare(tmp_path, 3)
    gets("3 kills (SIGKILL, SIGTERM) at random steps, resumed", "weights, chains and tables as uninterrupted", 0)


@pytest.mark.slow_faults
@pytest.mark.timeout(3600)
def test_fifty_kills(tmp_path, gets):
    runs = kill_and_compare(tmp_path, 50)
    what = f"weights, chains, records and tables of {runs} resumed runs as uninterrupted"
    gets("50 kills (SIGKILL, SIGTERM) at random steps, resumed", what, 0)


# --- the disk -----------------------------------------------------------------------------------------------

_LIMITED = (
    "import os, resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2); os.execvp(sys.argv[2], sys.argv[2:])"
)


def test_a_full_disk_leaves_the_old_checkpoint_whole(copy, tmp_path, gets):
    settings = {"method": "st_jem", "n_iterations": 40, "buffer_size": 20_000}
    assert program.train(copy, tmp_path, **settings).code == 0
    path = only(tmp_path, "checkpoints/*.pt")
    before = path.read_bytes()
    wrap = (program.sys.executable, "-c", _LIMITED, str(len(before) // 2))
    command = program.training(tmp_path, **settings, force=True)
    done = program.run(copy, *command, wrap=wrap)
    assert done.code == 1 and f"Cannot write {path}: File too large" in done.sentence
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name], "no half file is left"
    gets("a file cannot grow while a checkpoint is written", done.sentence, done.code)


def on_a_small_disk(folder: Path) -> bool:
    """Mount a file system of 2 MiB there; False where that is not permitted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "faults", str(folder)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def test_a_small_disk_that_fills(copy, tmp_path, gets):
    disk = tmp_path / "disk"
    if not on_a_small_disk(disk):
        pytest.skip("no file system can be mounted here")
    try:
        settings = {"method": "st_jem", "n_iterations": 40, "buffer_size": 20_000}
        assert program.train(copy, disk, **settings).code == 0
        path = only(disk, "checkpoints/*.pt")
        before = path.read_bytes()
        (disk / "filler").write_bytes(b"x" * (shutil.disk_usage(disk).free - 2**14))
        done = program.train(copy, disk, **settings, force=True)
        assert done.code == 1 and f"Cannot write {path}: No space left on device" in done.sentence
        assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]
        gets("disk full while a checkpoint is written", done.sentence, done.code)
        (disk / "filler").unlink()
        assert program.train(copy, disk, **settings).code == 0
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- checkpoints --------------------------------------------------------------------------------------------


class Hostile:
    """Unpickled by a careless reader, this makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


SHORT = {"method": "st_jem", "n_iterations": 20}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Path]:
    """A copy of the program, and the results of a short run of it."""
    root = program.copy(tmp_path_factory.mktemp("program"))
    folder = tmp_path_factory.mktemp("finished")
    assert program.train(root, folder, **SHORT).code == 0
    return root, folder


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("truncated", "cannot be read as a checkpoint"),
        ("hostile", "cannot be read as a checkpoint"),
        ("empty", "cannot be read as a checkpoint"),
        ("a list", "cannot be read as a checkpoint"),
        ("of another configuration", "another configuration"),
        ("of an older version, another hash", "another configuration"),
        ("of an older version, a field missing", "earlier version"),
        ("of an older version, other weights", "earlier version"),
    ],
)
def test_a_checkpoint_that_is_not_this_run_s_is_named_not_loaded(finished, tmp_path, gets, fault, sentence):
    root, results = finished
    shutil.copytree(results, tmp_path, dirs_exist_ok=True)
    path, owned = only(tmp_path, "checkpoints/*.pt"), tmp_path / "owned"
    whole, state = path.read_bytes(), load_checkpoint(path)
    if fault == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif fault == "hostile":
        torch.save(state | {"hash": Hostile(owned)}, path)
    elif fault == "empty":
        path.write_bytes(b"")
    elif fault == "a list":
        torch.save([1, 2], path)
    elif fault == "of another configuration":
        torch.save(state | {"hash": "0" * 12}, path)
    elif fault == "of an older version, another hash":
        torch.save({key: value for key, value in state.items() if key != "hash"}, path)
    elif fault == "of an older version, a field missing":
        torch.save({key: value for key, value in state.items() if key != "sums"}, path)
    else:
        weights = {key: value[:1] for key, value in state["model"].items()}
        torch.save(state | {"model": weights}, path)
    before = path.read_bytes()
    done = program.train(root, tmp_path, **SHORT)
    assert done.code == 1 and str(path) in done.err and sentence in done.sentence
    assert done.sentence.startswith("jemlib.checkpoints.CheckpointError: ")
    assert path.read_bytes() == before and not owned.exists()
    gets(f"checkpoint {fault}", done.sentence.removeprefix("jemlib.checkpoints."), done.code)
