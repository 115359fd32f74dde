"""The chain of notebooks: checked parameters, papermill, reports, an index; and JupyterLab on the same kernel."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jemlib.files import ResultsError, absolute, read_notebook, remove_leftovers, write_atomic
from jemlib.parameters import ParameterError, parameters, planned
from jemlib.provenance import git_state, repo_root
from jemlib.results import Store

__all__ = ["ParameterError", "kernel_environment", "lab", "parameters", "run"]

#: how a sentence about a kernel that could not be started begins
NOT_STARTED = "the kernel did not start"
_MEMORY = "take fewer data, a smaller batch or buffer, or fewer workers"


def run(
    profile: str = "quick",
    only: str | None = None,
    seed: int | None = None,
    force: bool = False,
    data: Path | None = None,
    out: Path | None = None,
    notebooks: Path | None = None,
) -> int:
    """Run the notebooks of a profile in order and write executed copies, reports and an index; the exit code.

    0: all ran; 1: one failed (named on stderr; what needs it is not run); 130: interrupted. Everything that can be
    checked without a kernel is checked before the first one starts: `ParameterError`, or `ResultsError` where
    nothing can be written. `data` and `out` count from the working folder, out=None is results/<profile>.
    """
    from filelock import FileLock, Timeout

    folder = notebooks or repo_root() / "notebooks"
    results = str(Path("results", profile) if out is None else absolute(out))
    given = {"profile": profile, "results_dir": results, "force": force or None, "seed": seed}
    given["data_dir"] = None if data is None else str(absolute(data))
    plan = planned(folder, profile, only, {name: value for name, value in given.items() if value is not None})
    check_data(given["data_dir"] or "")
    root = Store(results, "run").dir
    command = f"./run_all.sh --profile {profile}{'' if seed is None else f' --seed {seed}'}"
    try:
        with FileLock(root / ".lock", timeout=0), kernel_environment():
            return _run_all(plan, folder, root, profile, command)
    except Timeout:
        raise BlockingIOError(f"Another run is writing to {root}.") from None


def check_data(data_dir: str) -> None:
    """ParameterError for a folder of data that is not there, while the results of an earlier run still are."""
    from jemlib.data import DataError, data_places

    try:
        data_places(data_dir)
    except DataError as error:
        raise ParameterError(str(error)) from error


def _run_all(plan: dict[str, dict[str, Any]], folder: Path, root: Path, profile: str, command: str) -> int:
    from jemlib import reports, watch

    sources = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    needs = {source.stem: _needs(source) for source in sources}
    earlier = [root] + ([repo_root() / "results" / "reference"] if profile == "quick" else [])
    known = watch.known_times(earlier, list(plan))
    for stem in plan:  # nothing of an earlier run may look like this one's
        Store(root, stem).clear()
    remove_leftovers(root)
    (root / "notebooks").mkdir(exist_ok=True)
    failed: dict[str, str] = {}
    not_run: dict[str, str] = {}
    interrupted = False
    with watch.Watch(list(plan), known) as told:
        for number, (stem, given) in enumerate(plan.items(), 1):
            broken = [other for other in needs[stem] if other in failed or other in not_run]
            if interrupted or broken:
                not_run[stem] = f"not run: it needs {', '.join(broken)}" if broken else "not run: interrupted before"
                told.say(f"[{number}/{len(plan)}] {stem} {not_run[stem]}", failure=True)
                continue
            told.at_notebook(stem)
            reports.write_index(root, sources, profile, not_run | {stem: reports.UNFINISHED})
            start = time.perf_counter()
            about = {"profile": profile, "command": f"{command} --only {_only(stem, needs)}", **git_state()}
            try:
                failure = _missing(root, needs[stem]) or execute(
                    folder / f"{stem}.ipynb", _unfinished(root, stem), given, cwd=folder, engine_name=watch.ENGINE
                )
            except KeyboardInterrupt:
                failure, interrupted = "it was interrupted", True
            about["seconds"] = round(time.perf_counter() - start, 1)
            if failure := failure or _missing(root, [stem]):
                failed[stem] = failure
                message = f"[{number}/{len(plan)}] {stem} FAILED after {about['seconds']:.0f} s: {failure}"
                told.say(message, failure=True)
            else:
                Store(root, stem).timing({"what": f"notebook {stem}", "seconds": about["seconds"]})
                told.say(f"[{number}/{len(plan)}] {stem} ok, {about['seconds']:.0f} s")
            _finish(root, stem, about, failure, given)
    reports.write_index(root, sources, profile, not_run)
    print(_summary(root, plan, failed, not_run), flush=True)
    return 130 if interrupted else int(bool(failed))


def _summary(root: Path, plan: Iterable[str], failed: dict[str, str], not_run: dict[str, str]) -> str:
    """The last lines of a run: what ended how, and where to look."""
    ended = [f"{stem} {'FAILED' if stem in failed else 'not run' if stem in not_run else 'ok'}" for stem in plan]
    where = os.path.relpath(root / "index.html") if root.is_relative_to(Path.cwd()) else root / "index.html"
    return f"{'stopped' if failed or not_run else 'done'}: {', '.join(ended)}\nsee {where}"


def _needs(source: Path) -> list[str]:
    """The notebooks whose results a notebook reads, as its metadata say."""
    import nbformat

    return list(nbformat.read(source, as_version=4).metadata.get("jemlib", {}).get("needs", []))


def _only(stem: str, needs: dict[str, list[str]]) -> str:
    """Numbers of a notebook and what it needs, for --only."""
    return ",".join(sorted(name.split("_")[0] for name in {stem, *needs[stem]}))


def _missing(root: Path, stems: Iterable[str]) -> str | None:
    """A sentence about the first file that a notebook wrote, or trained, and that is not there any more."""
    for stem in stems:
        for path in Store(root, stem).files():
            if not path.is_file():
                return f"{path.relative_to(root)}, which {stem} wrote, is missing: run {stem} again"
    return None


def execute(source: Path, target: Path, given: dict[str, Any], **options: Any) -> str | None:
    """Execute a notebook with papermill into `target`, written cell by cell; one sentence where it failed.

    options: as of `papermill.execute_notebook`.
    """
    import nbformat
    import papermill
    from nbclient.exceptions import DeadKernelError

    for name in ("papermill", "asyncio"):  # failures are told here; papermill's name check misfires
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        papermill.execute_notebook(
            source, target, given, kernel_name="python3", language="python", progress_bar=False, start_timeout=180,
            coalesce_streams=True, **options,
        )  # fmt: skip
    except papermill.PapermillExecutionError as error:
        if error.ename.endswith(("MemoryError", "TerminatedWorkerError")) or "memory: you tried" in error.evalue:
            return f"out of memory in cell {error.cell_index + 1} ({error.ename}); {_MEMORY}"
        return f"cell {error.cell_index + 1} (In [{error.exec_count}]) raised {error.ename}: {error.evalue}"
    except DeadKernelError:
        cells = nbformat.read(target, as_version=4).cells
        started = [i for i, cell in enumerate(cells, 1) if cell.metadata.get("papermill", {}).get("start_time")]
        where = f"in cell {started[-1]}" if started else "before the first cell"
        return f"the kernel died {where}: it was killed, most often because memory ran out; {_MEMORY}"
    except RuntimeError as error:
        return f"{NOT_STARTED}: {error}"
    return None


def _unfinished(root: Path, stem: str) -> Path:
    """Where a notebook is executed: what a killed run leaves is not mistaken for a whole one."""
    return root / "notebooks" / f"{stem}.unfinished.ipynb"


def without_chance(notebook: Any) -> Any:
    """The notebook with outputs that say the same in every equal run: no addresses, no random ids of styled tables."""
    for i, cell in enumerate(notebook.cells):
        for j, output in enumerate(cell.get("outputs", [])):
            data = output.get("data", {})
            if "text/plain" in data:
                data["text/plain"] = re.sub(r" at 0x[0-9a-f]+", "", data["text/plain"])
            if "text/html" in data:
                data["text/html"] = re.sub(r"\bT_[0-9a-f]{5}(?=[_\W])", f"T_{i}_{j}", data["text/html"])
    return notebook


def without_folder(notebook: Any, path: str, name: str) -> None:
    """Put `name` for the folder `path` in the text of a notebook; pictures, and paths that are others, stay."""
    # either a picture inside HTML, which is kept, or the path: whole, or followed by what lies in it
    start, end = r"(?:(?<![\w.~+-])|(?<=\\[nrt]))", r"(?![\w~+-]|\.\w)"
    pattern = re.compile(rf"(data:image/[^\s\"'<>]*)|{start}{re.escape(path)}{end}")

    def named(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: match[1] or name, value)
        if isinstance(value, dict):
            return {key: named(part) for key, part in value.items()}
        return [named(part) for part in value] if isinstance(value, list) else value

    notebook.metadata["papermill"] = named(notebook.metadata.get("papermill", {}))
    for cell in notebook.cells:
        cell["source"] = named(cell.source)
        for output in cell.get("outputs", []):
            for key in {"text", "evalue", "traceback"} & output.keys():
                output[key] = named(output[key])
            data = output.get("data", {})
            data.update({kind: named(value) for kind, value in data.items() if kind.startswith("text/")})


def _finish(root: Path, stem: str, about: dict[str, Any], failure: str | None, given: dict[str, Any]) -> None:
    """Write the page of an executed notebook, and its copy under the final name where it did not fail.

    A whole copy names no folder of this machine: what was given as an absolute path reads <results_dir>, <data_dir>.
    """
    import nbformat

    from jemlib import reports

    unfinished = _unfinished(root, stem)
    try:
        notebook = read_notebook(unfinished)
    except (FileNotFoundError, ResultsError):  # it did not come to start, or no further than half a file
        if not failure:  # nothing passes for a result
            raise
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(f"# {stem}")])
    notebook.metadata["jemlib"] = about | ({"failure": failure} if failure else {})
    notebook.metadata.setdefault("papermill", {}).update(input_path=f"{stem}.ipynb", output_path=f"{stem}.ipynb")
    for name in () if failure else ("results_dir", "data_dir"):
        if os.path.isabs(path := given.get(name, "")):
            without_folder(notebook, path, f"<{name}>")
    content = nbformat.writes(without_chance(notebook))
    reports.write_page(root, nbformat.reads(content, as_version=4), stem)
    if failure:
        write_atomic(unfinished, content.encode())
    else:
        write_atomic(root / "notebooks" / f"{stem}.ipynb", content.encode())
        unfinished.unlink()


# --- kernels ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def kernel_environment() -> Iterator[None]:
    """Inside, the kernel `python3` is this very Python with this very jemlib, whatever kernels the user installed."""
    from ipykernel.kernelspec import write_kernel_spec

    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        # The kernel's log (a warning about TCP on the loopback, noise at shutdown) is not the notebook's output.
        write_kernel_spec(str(Path(folder, "kernels", "python3")), extra_arguments=["--log-level=CRITICAL"])
        for name, first in (("JUPYTER_PATH", folder), ("PYTHONPATH", str(repo_root()))):
            os.environ[name] = os.pathsep.join(filter(None, [first, os.environ.get(name)]))
        if data := os.environ.get("JEMLIB_DATA"):  # a kernel works in another folder
            os.environ["JEMLIB_DATA"] = str(Path(data).expanduser().absolute())
        os.environ.setdefault("JEMLIB_PROGRESS", "lines")
        os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # else a warning about frozen modules
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def lab(arguments: Sequence[str] = ()) -> int:
    """JupyterLab on the notebooks, on the loopback address, until it is stopped; its exit code."""
    where = ["--ip=127.0.0.1", f"--ServerApp.root_dir={repo_root() / 'notebooks'}"]
    with kernel_environment():
        os.environ.pop("JEMLIB_PROGRESS")  # a person watches
        with subprocess.Popen([sys.executable, "-m", "jupyterlab", *where, *arguments]) as server:
            # Ctrl-C reaches the server too, which asks first and then ends its kernels: it is waited for
            handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: server.terminate()}
            before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
            try:
                return server.wait()
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
