"""Kernels that die, runs that are stopped, odd folders, many at once: what is not whole is not called so."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import program
import psutil
import pytest
import torch

from jemlib import runs
from jemlib.results import Store

HERE = "import os, pathlib\npathlib.Path('here').write_text(str(os.getpid()))\nimport time\ntime.sleep(120)"


def wait_for(path: Path, process) -> int:
    """The number in a file that a notebook writes once it runs."""
    for _ in range(900):
        if path.exists() and path.read_text():
            return int(path.read_text())
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise TimeoutError(path)


def gone(pid: int, seconds: float = 15) -> bool:
    """Whether a process has ended within some seconds."""
    for _ in range(int(10 * seconds)):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def states(out: Path) -> str:
    return (out / "index.html").read_text()


# --- kernels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "cell", "sentence"),
    [
        ("the kernel is killed", "import os\nos.kill(os.getpid(), 9)", "the kernel died in cell 4"),
        ("more memory than there is", "import torch\ntorch.empty(10**14)", "out of memory in cell 4"),
        ("more memory than there is, numpy", "import numpy\nnumpy.ones(10**14)", "out of memory in cell 4"),
    ],
)
def test_a_kernel_that_dies_or_runs_out_of_memory(copy, tmp_path, gets, fault, cell, sentence):
    program.with_notebooks(copy, _01_first=[cell, "1"], _02_second=["1"])
    done = program.study(copy, "--out", str(tmp_path / "out"))
    assert done.code == 1 and sentence in done.sentence and "memory" in done.sentence and "Traceback" not in done.err
    assert f"FAILED: {sentence}" in states(tmp_path / "out")
    assert "02_second ok" in states(tmp_path / "out"), "it does not need the first one"
    assert "<title>FAILED: 01_first" in (tmp_path / "out" / "reports" / "01_first.html").read_text()
    gets(fault, done.sentence, done.code)


def test_a_kernel_name_that_does_not_exist_is_not_asked_for(copy, tmp_path, gets):
    program.with_notebooks(copy, _01_first=["1"])
    path = copy / "notebooks" / "01_first.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata["kernelspec"] = {"name": "my-old-env", "display_name": "My old env", "language": "python"}
    nbformat.write(notebook, path)
    done = program.study(copy, "--out", str(tmp_path / "out"))
    assert done.code == 0, done.err
    gets("a saved kernel name that does not exist", "runs in this environment's own kernel", done.code)


@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)], ids=lambda value: str(value)
)
def test_a_stopped_run_leaves_no_kernel_and_is_finished_later(copy, tmp_path, gets, how, code):
    program.with_notebooks(copy, _01_first=[HERE], _02_second=["1"])
    out, here = tmp_path / "out", copy / "notebooks" / "here"
    process = program.start(copy, "-P", "-m", "jemlib", "run", "--out", str(out))
    kernel = wait_for(here, process)
    process.send_signal(how)
    done = program.end(process)
    assert done.code == code, done
    assert gone(kernel), "a kernel goes on by itself"
    pages = [path.read_text() for path in out.glob("reports/*")]
    assert all("<title>FAILED: 01_first" in page for page in pages), "nothing looks whole"
    assert [path.name for path in out.glob("notebooks/*")] == ["01_first.unfinished.ipynb"]
    ended = "not finished: running, or killed" if how == signal.SIGKILL else "FAILED: it was interrupted"
    assert ended in states(out)
    told = [line for line in done.err.splitlines() if "FAILED" in line]
    said = told[0] if told else f"nothing, as nothing can; the index says {ended!r}"
    if how != signal.SIGKILL:
        assert "01_first FAILED" in done.err and "it was interrupted" in done.err and "Traceback" not in done.err
        assert done.sentence.endswith("02_second not run: interrupted before")
    program.with_notebooks(copy, _01_first=["1"], _02_second=["1"])
    half, living = (out / "notebooks" / f".01_first.ipynb.{pid}.tmp" for pid in (999_999_999, os.getpid()))
    half.write_text("half a file, as of a process killed while it wrote")
    living.write_text("half a file, of a process that goes on")
    again = program.study(copy, "--out", str(out))
    assert again.code == 0, again.err
    assert not half.exists() and living.exists()
    assert "FAILED" not in states(out) and not list(out.glob("notebooks/*.unfinished.ipynb"))
    name = "Ctrl-C" if how == signal.SIGINT else how.name
    gets(f"{name} while a notebook runs; kernel gone, next run whole", said, done.code)


def test_two_runs_into_one_folder(copy, tmp_path, gets):
    program.with_notebooks(copy, _01_first=[HERE])
    out = str(tmp_path / "out")
    first = program.start(copy, "-P", "-m", "jemlib", "run", "--out", out)
    wait_for(copy / "notebooks" / "here", first)
    done = program.study(copy, "--out", out)
    first.send_signal(signal.SIGINT)
    program.end(first)
    assert done.code == 1 and "Another run is writing to" in done.sentence and "Traceback" not in done.err
    gets("two runs into one results folder", done.sentence, done.code)


@pytest.mark.timeout(600)
def test_twelve_kernels_at_once(copy, tmp_path, gets):
    program.with_notebooks(copy, _01_first=["import time\ntime.sleep(3)", program.LEAVE])
    folders = [tmp_path / f"out {i}" for i in range(12)]
    running = [program.start(copy, "-P", "-m", "jemlib", "run", "--out", str(folder)) for folder in folders]
    ended = [program.end(process, 500) for process in running]
    assert [done.code for done in ended] == [0] * 12, [done.err for done in ended]
    for folder in folders:
        assert (folder / "notebooks" / "01_first.ipynb").is_file()
        assert json.loads((folder / "left.json").read_text())["results_dir"] == str(folder), "each its own output"
    gets("twelve kernels at once", "twelve whole runs, each with its own output", 0)


def test_two_notebooks_that_add_to_one_record(tmp_path, gets):
    store = Store(tmp_path, "01_first")
    store.record("run", {"seed": 0})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: runs.add_metrics(store, "run", {f"m{i}": i}), range(40)))
    assert store.read_record("run") == {"seed": 0, "metrics": {f"m{i}": i for i in range(40)}}
    gets("40 metrics added to one record at once", "all 40 are kept")


# --- folders ------------------------------------------------------------------------------------------------


def test_any_working_folder_and_odd_names(copy, tmp_path, gets):
    """The copy lies in "jem lib é"; the working folder and the results have a space, quotes and Chinese letters."""
    program.with_notebooks(copy, _01_first=[program.LEAVE])
    where = tmp_path / "a 'folder' 数据"
    where.mkdir()
    done = program.study(copy, "--out", "out ü", cwd=where, env={"LC_ALL": "C"})
    assert done.code == 0, done.err
    left = json.loads((where / "out ü" / "left.json").read_text(encoding="utf-8"))
    assert left == {"results_dir": str(where / "out ü"), "jemlib": str(copy / "jemlib" / "__init__.py")}
    assert (where / "out ü" / "reports" / "01_first.html").is_file() and os.listdir(where) == ["out ü"]
    gets("any working folder; spaces, quotes, é and 数据 in paths; LC_ALL=C", "a whole run", done.code)


# --- threads ------------------------------------------------------------------------------------------------

TOLERANCE = 1e-5  # of weights of size 0.1 after ten iterations; other threads add up in another order


def test_one_thread_against_four(copy, tmp_path, gets):
    settings = {"method": "st_jem", "data": "images", "network": "conv_net", "width": 8, "n_iterations": 10}
    settings["precision"] = "float32"  # bfloat16 rounds coarser
    weights = []
    for threads in (1, 4):
        done = program.train(copy, tmp_path / str(threads), **settings, threads=threads, batch_size=64)
        assert done.code == 0, done.err
        (path,) = (tmp_path / str(threads)).glob("checkpoints/*.pt")
        weights.append(torch.load(path, weights_only=True)["model"])
    worst = max(float((weights[0][key] - weights[1][key]).abs().max()) for key in weights[0])
    assert worst < TOLERANCE
    gets("1 against 4 threads, ten iterations", f"weights differ by {worst:.1e} at most (tolerance {TOLERANCE:g})", 0)
