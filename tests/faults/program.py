"""The program as a user has it: a copy of its own, started as processes that get real files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import nbformat
import yaml
from nbformat.v4 import new_code_cell, new_notebook

from jemlib.provenance import repo_root

#: a clean start: what the developer's shell says about data, environments and proxies plays no part
_FOREIGN = ("JEMLIB_DATA", "JEMLIB_PROGRESS", "VIRTUAL_ENV", "CONDA_PREFIX", "JUPYTER_PATH", "JPY_SESSION_NAME")
PARAMETERS = 'results_dir: str = "results/quick"  # where'
START = "from jemlib import study\nconfig = study.parameters(globals())"
#: a cell that leaves a file: the executed copy itself names no folder of this machine
LEAVE = (
    "import json, pathlib, jemlib\n"
    "where = {'results_dir': results_dir, 'jemlib': jemlib.__file__}\n"
    "pathlib.Path(results_dir, 'left.json').write_text(json.dumps(where), encoding='utf-8')"
)


class Done(NamedTuple):
    """How a process ended: exit code, what it printed, and the last line of its messages."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        return self.err.strip().splitlines()[-1] if self.err.strip() else ""


def copy(folder: Path) -> Path:
    """A copy of the program in a folder whose name has a space and a letter beyond ASCII; no cache, no results."""
    root = folder / "jem lib é"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "results", "tests")
    return Path(shutil.copytree(repo_root(), root, ignore=ignored))


def with_notebooks(root: Path, **cells: list[str]) -> Path:
    """The copy with small notebooks, stem -> cells, in the place of the study's."""
    shutil.rmtree(root / "notebooks")
    (root / "notebooks" / "params").mkdir(parents=True)
    (root / "notebooks" / "params" / "quick.yaml").write_text("{}")
    for stem, sources in cells.items():
        notebook = new_notebook(cells=[new_code_cell(source) for source in (PARAMETERS, START, *sources)])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook.cells[0].metadata["tags"] = ["parameters"]
        nbformat.write(notebook, root / "notebooks" / f"{stem.strip('_')}.ipynb")
    return root


def smoke_with(root: Path, stem: str, **values: object) -> None:
    """Set parameters of a notebook in the copy's smoke profile."""
    path = root / "notebooks" / "params" / "smoke.yaml"
    settings = yaml.safe_load(path.read_text())
    settings[stem] = settings.get(stem, {}) | values
    path.write_text(yaml.safe_dump(settings, allow_unicode=True), encoding="utf-8")


def _hear_interrupts() -> None:
    """Undo what a shell does to the tests that it runs with &."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(root: Path, *command: str, wrap: tuple[str, ...] = (), **options) -> subprocess.Popen:
    """Start `python command` with the copy's jemlib, in the folder "/" unless told otherwise."""
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    environment |= {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"} | options.pop("env", {})
    options.setdefault("preexec_fn", _hear_interrupts)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    return subprocess.Popen([*wrap, sys.executable, *command], **({"cwd": "/", "env": environment} | pipes | options))


def end(process: subprocess.Popen, timeout: float = 240) -> Done:
    """Wait for a process."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Done(process.returncode, out, err)


def run(root: Path, *command: str, **options) -> Done:
    """Start `python command` and wait for its end."""
    return end(start(root, *command, **options))


def study(root: Path, *arguments: str, **options) -> Done:
    """`python -m jemlib run ...`, what ./run_all.sh ends with."""
    return run(root, "-P", "-m", "jemlib", "run", *arguments, **options)


def train(root: Path, folder: Path, **settings) -> Done:
    """The training script beside this file, in a process of its own, with its settings as JSON."""
    return run(root, *training(folder, **settings))


def training(folder: Path, **settings) -> tuple[str, ...]:
    """The command of the training script: results go to `folder`."""
    return str(Path(__file__).with_name("train.py")), str(folder), json.dumps(settings)
