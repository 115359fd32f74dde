"""The chain of notebooks: checked parameters, papermill, reports, an index; and JupyterLab on the same kernel."""

from __future__ import annotations

import contextlib
import html
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jemlib.parameters import MISSING, ParameterError, check_names, coerce, declarations, parameters
from jemlib.results import Store, git_state, repo_root, write_atomic

__all__ = ["ParameterError", "kernel_environment", "lab", "parameters", "run"]

MEMORY = "take fewer data, a smaller batch or buffer, or fewer workers"

# nbconvert's "lab" page leaves the alt text of a figure out.
REPORT_TEMPLATE = """{% extends "lab/index.html.j2" %}
{% block data_png scoped %}
<div class="jp-RenderedImage jp-OutputArea-output {{ extra_class }}">
<img src="data:image/png;base64,{{ output.data['image/png'] | escape_html }}"
{%- for name in ("width", "alt") if output | get_metadata(name, "image/png") %}
{{ name }}="{{ output | get_metadata(name, 'image/png') | escape_html }}"
{%- endfor %}>
</div>
{% endblock %}
"""


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

    0: all ran; 1: one failed (named on stderr, the rest is not run); 130: interrupted. Everything that can be
    checked without a kernel is checked before the first one starts: `ParameterError`, or `ResultsError` where
    nothing can be written. `data` and `out` count from the working folder, out=None is results/<profile>.
    """
    from filelock import FileLock, Timeout

    folder = notebooks or repo_root() / "notebooks"
    results = str(Path("results", profile) if out is None else out.absolute())
    given = {"profile": profile, "results_dir": results, "force": force or None, "seed": seed}
    given["data_dir"] = None if data is None else str(data.expanduser().absolute())
    plan = _plan(folder, profile, only, {name: value for name, value in given.items() if value is not None})
    root = Store(results, "run").dir
    try:
        with FileLock(root / ".lock", timeout=0), kernel_environment():
            return _run_all(plan, folder, root, profile)
    except Timeout:
        raise BlockingIOError(f"Another run is writing to {root}.") from None


def _plan(folder: Path, profile: str, only: str | None, given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """notebook stem -> checked parameters, for the chosen notebooks; every notebook of the folder is checked."""
    import yaml

    stems = sorted(path.stem for path in folder.glob("[0-9][0-9]_*.ipynb"))
    chosen = _choose(stems, only)
    declared = {stem: _declared(folder / f"{stem}.ipynb") for stem in stems}
    file = folder / "params" / f"{profile}.yaml"
    try:
        settings = dict(yaml.safe_load(file.read_text()) or {})
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ParameterError(f"{file.name} is no valid parameter file: {' '.join(str(error).split())}") from error
    common = settings.pop("all", None) or {}
    check_names(settings, stems, f"{file.name}: ")
    check_names(common, {name for names in declared.values() for name in names}, f"{file.name}, all: ")
    plan = {}
    for stem in stems:
        own = settings.get(stem) or {}
        check_names(own, declared[stem], f"{file.name}, {stem}: ")
        merged = {**{name: common[name] for name in common if name in declared[stem]}, **own}
        merged |= {name: given[name] for name in given if name in declared[stem]}
        kinds = {name: declared[stem][name][0] for name in merged}
        plan[stem] = {name: coerce(name, merged[name], kinds[name], f"{file.name}, {stem}: ") for name in merged}
    return {stem: plan[stem] for stem in chosen}


def _choose(stems: list[str], only: str | None) -> list[str]:
    wanted = [item.strip() for item in (only or "").split(",") if item.strip()]
    for item in wanted:
        if not any(item in (stem, stem.split("_")[0]) for stem in stems):
            raise ValueError(f"There is no notebook '{item}'; there are {', '.join(stems)}.")
    return [stem for stem in stems if not wanted or stem in wanted or stem.split("_")[0] in wanted]


def _declared(path: Path) -> dict[str, tuple[Any, Any]]:
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    tagged = [cell.source for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    try:
        found = declarations(tagged[0]) if tagged else {}
    except ParameterError as error:
        raise ParameterError(f"{path.name}: {error}") from error
    if not found:
        raise ParameterError(
            f"{path.name} has no cell tagged 'parameters' that holds only 'name: type = default' lines."
        )
    for name, (kind, default) in found.items():
        if default is not MISSING:
            coerce(name, default, kind, f"{path.name}: ")
    return found


def _run_all(plan: dict[str, dict[str, Any]], folder: Path, root: Path, profile: str) -> int:
    for stem in plan:  # nothing of an earlier run may look like this one's
        Store(root, stem).clear()
    (root / "notebooks").mkdir(exist_ok=True)
    code = 0
    for number, (stem, given) in enumerate(plan.items(), 1):
        print(f"[{number}/{len(plan)}] {stem} ...", flush=True)
        _write_index(root, folder, profile)
        start = time.perf_counter()
        try:
            error = _run_one(folder / f"{stem}.ipynb", root, given, profile)
        except KeyboardInterrupt:
            error, code = "interrupted", 130
        seconds = time.perf_counter() - start
        if error:
            print(f"[{number}/{len(plan)}] {stem} FAILED after {seconds:.0f} s: {error}", file=sys.stderr, flush=True)
            code = code or 1
            break
        Store(root, stem).timing({"what": f"notebook {stem}", "seconds": round(seconds, 1)})
        print(f"[{number}/{len(plan)}] {stem} ok, {seconds:.0f} s", flush=True)
    _write_index(root, folder, profile)
    print(f"{'done' if code == 0 else 'stopped'}: {root / 'index.html'}", flush=True)
    return code


def _run_one(source: Path, root: Path, given: dict[str, Any], profile: str) -> str | None:
    """Execute one notebook and write its report; one sentence when it failed."""
    import nbformat
    import papermill
    from nbclient.exceptions import DeadKernelError
    from nbconvert import HTMLExporter

    for name in ("papermill", "asyncio"):  # failures are told below; papermill's name check misfires
        logging.getLogger(name).setLevel(logging.CRITICAL)
    target = root / "notebooks" / source.name
    unfinished = target.with_suffix(".unfinished.ipynb")  # what a killed run leaves is not mistaken for a whole one
    try:
        notebook = papermill.execute_notebook(
            source, unfinished, given, kernel_name="python3", language="python", cwd=source.parent,
            progress_bar=sys.stderr.isatty(), start_timeout=180,
        )  # fmt: skip
    except papermill.PapermillExecutionError as error:
        if error.ename.endswith(("MemoryError", "TerminatedWorkerError")) or "memory: you tried" in error.evalue:
            return f"out of memory in cell {error.cell_index + 1} ({error.ename}); {MEMORY}"
        return f"cell {error.cell_index + 1} (In [{error.exec_count}]) raised {error.ename}: {error.evalue}"
    except DeadKernelError:
        cells = nbformat.read(unfinished, as_version=4).cells
        started = [i for i, cell in enumerate(cells, 1) if cell.metadata.get("papermill", {}).get("start_time")]
        where = f"in cell {started[-1]}" if started else "before the first cell"
        return f"the kernel died {where}: it was killed, most often because memory ran out; {MEMORY}"
    except RuntimeError as error:
        return f"the kernel did not start: {error}"
    about = {"profile": profile, "seconds": round(notebook.metadata.papermill.duration, 1), **git_state()}
    notebook.metadata["jemlib"] = about
    notebook.metadata.papermill.update(input_path=source.name, output_path=target.name)  # no folder of this machine
    page, _ = HTMLExporter(raw_template=REPORT_TEMPLATE).from_notebook_node(
        notebook, {"metadata": {"name": source.stem}}
    )
    write_atomic(root / "reports" / f"{source.stem}.html", page.encode())
    write_atomic(target, nbformat.writes(notebook).encode())
    unfinished.unlink()
    return None


def _write_index(root: Path, folder: Path, profile: str) -> None:
    """index.html from the executed copies that are there: link, status, commit, start and duration."""
    import nbformat

    rows = []
    for stem in sorted(path.stem for path in folder.glob("[0-9][0-9]_*.ipynb")):
        path = root / "notebooks" / f"{stem}.ipynb"
        if path.is_file():
            metadata = nbformat.read(path, as_version=4).metadata
            about = metadata.jemlib
            commit = f"{(about.commit or 'unknown')[:12]}{' (dirty)' if about.dirty else ''}"
            link = f'<a href="reports/{stem}.html">{stem}</a>'
            rows.append([link, "ok", commit, metadata.papermill.start_time[:16], f"{about.seconds:.0f} s"])
        else:
            status = "FAILED" if path.with_suffix(".unfinished.ipynb").is_file() else "not run"
            rows.append([stem, status, "", "", ""])
    head = "".join(f"<th>{name}</th>" for name in ("notebook", "status", "commit", "started (UTC)", "took"))
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows)
    title = f"jemlib: {html.escape(profile)}"
    page = f"""<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>body {{ font: 16px sans-serif; margin: 2em }} td, th {{ padding: .3em 1em; text-align: left }}</style>
<h1>{title}</h1>
<table><tr>{head}</tr>
{body}</table></html>
"""
    write_atomic(root / "index.html", page.encode())


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
        return subprocess.call([sys.executable, "-m", "jupyterlab", *where, *arguments])
