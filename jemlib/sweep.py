"""Sweeps: a grid of parameters, one papermill execution of a notebook a cell, run by dask.

A cell is finished when its `cell.json` says "done"; that file is written last. Finished cells are read, all others
run, so the same command continues whatever ended it.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jemlib.files import ResultsError, absolute, read_csv, read_json, write_atomic
from jemlib.parameters import MISSING, ParameterError, check_names, coerce, declared_in
from jemlib.provenance import repo_root
from jemlib.results import Store

if TYPE_CHECKING:
    import pandas as pd

#: name of the table that holds a cell's metrics, where no other is named
TABLE = "sweep_row"
#: status of rows whose cell left no numbers; all others are "ok" or "diverged at step n"
STATUSES_WITHOUT_RESULT = ("raised", "not run")
#: what a grid of a file looks like, for whoever wrote it otherwise
_FILE_FORM = "'grid: {name: value or [values], ...}' and 'seeds: 0-2' or either of them"
_LARGEST_SEED = 2**31 - 1
#: where and how a cell runs; neither swept nor part of what names it
_OURS = ("results_dir", "data_dir", "force", "workers")


class Cell(NamedTuple):
    """One point of the grid: the name of its folder and its typed parameters."""

    name: str
    given: dict[str, Any]


# --- the grid -----------------------------------------------------------------------------------------------


def parse_grid(texts: Sequence[str]) -> dict[str, list[str]]:
    """name=value,value,... -> name -> values as text; a value that holds a comma is written in double quotes."""
    found: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = (part.strip() for part in text.partition("="))
        parts = [part.strip() for part in next(csv.reader([values], skipinitialspace=True), [])]
        if not (name and equals) or not all(parts) or not parts:
            raise ParameterError(f"A grid reads name=value,value,..., not '{text}'.")
        if name in found:
            raise ParameterError(f"The grid names '{name}' twice.")
        found[name] = parts
    return found


def parse_seeds(text: str) -> list[int]:
    """ "0-2" or "0,3" or both, as whole numbers."""
    found: list[int] = []
    for part in str(text).split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ParameterError(f"Seeds read 0-2 or 0,3, not '{text}'.")
        if int(match[2] or match[1]) > _LARGEST_SEED:
            raise ParameterError(f"Seeds are at most {_LARGEST_SEED}, not '{text}'.")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def read_file(path: Path) -> tuple[dict[str, list[Any]], str | None]:
    """(grid, seeds) of a YAML file: `grid`, name -> value or list of values, and `seeds` as on the command line."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ParameterError(f"{path.name} is no sweep file, which reads {_FILE_FORM}: {why}") from error
    grid = (content.pop("grid", None) or {}) if isinstance(content, dict) else None
    if not isinstance(grid, dict):
        raise ParameterError(f"{path.name} is no sweep file, which reads {_FILE_FORM}.")
    grid = {name: value if isinstance(value, list) else [value] for name, value in grid.items()}
    has_seeds, seeds = "seeds" in content, content.pop("seeds", None)
    if content:
        raise ParameterError(f"{path.name}: Unknown entry '{next(iter(content))}': there are grid, seeds.")
    if not has_seeds:
        return grid, None
    if "seed" in grid:
        raise ParameterError(f"{path.name}: The seed is given twice, in seeds and in grid.")
    text = ",".join(map(str, seeds)) if isinstance(seeds, list) else "" if seeds is None else str(seeds).strip()
    if not text:
        raise ParameterError(f"{path.name}: seeds gives none; write 0-2 or 0,3, or leave the entry out.")
    return grid, text


def cells(notebook: Path, grid: Mapping[str, Sequence[Any]]) -> list[Cell]:
    """Every cell of the grid, the last name fastest, its values typed by the notebook's parameters cell.

    `ParameterError` for a name that is not declared, a value of another type or one given twice.
    """
    import nbformat

    from jemlib.config import FORMAT

    declared = declared_in(notebook)
    where = f"{notebook.name}: "
    check_names(grid, declared, where)
    for name in _OURS:
        if name in grid:
            raise ParameterError(f"{where}'{name}' is set by the sweep.")
    if "results_dir" not in declared:
        raise ParameterError(f"{where}A notebook needs the parameter results_dir to be swept.")
    typed = {}
    for name, values in grid.items():
        if not len(values):
            raise ParameterError(f"{where}The grid gives no value of '{name}'.")
        typed[name] = [coerce(name, value, declared[name][0], where) for value in values]
        if name == "seed" and any(isinstance(value, int) and not 0 <= value <= _LARGEST_SEED for value in typed[name]):
            raise ParameterError(f"{where}Seeds are from 0 to {_LARGEST_SEED}.")
        if any(value in typed[name][:i] for i, value in enumerate(typed[name])):
            raise ParameterError(f"{where}The grid gives a value of '{name}' twice.")
    defaults = {name: default for name, (_, default) in declared.items() if name not in _OURS}
    # prose may change, code that ran may not
    code = [cell.source for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]
    found = []
    for values in product(*typed.values()):
        given = dict(zip(typed, values, strict=True))
        effective = {name: None if value is MISSING else value for name, value in (defaults | given).items()}
        whole = json.dumps([FORMAT, notebook.stem, code, effective], sort_keys=True, default=str)
        readable = re.sub(r"[^A-Za-z0-9_.+-]+", "-", "_".join(f"{name}-{value}" for name, value in given.items()))
        found.append(Cell(f"{readable[:100] or 'only'}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}", given))
    return found


def check_table(notebook: Path, table: str) -> None:
    """`ParameterError` where the notebook's code names the tables that it writes and `table` is none of them."""
    names = re.findall(r'store\.table\(\s*\\?"(\w+)\\?"', notebook.read_text())
    if names and table not in names:
        raise ParameterError(
            f"{notebook.name} writes no table '{table}'; choose with --table from {', '.join(dict.fromkeys(names))}."
        )


# --- the sweep ----------------------------------------------------------------------------------------------


def run(
    notebook: Path,
    grid: Mapping[str, Sequence[Any]],
    out: str | Path,
    *,
    table: str = TABLE,
    scheduler: str | None = None,
    workers: int = 0,
    data: Path | None = None,
    force: bool = False,
) -> int:
    """Run the cells of a grid that are not finished and write table and page; the exit code.

    0: every cell is done, diverged ones included; 1: one raised or was not run; 130: interrupted. out: a folder under
    results/sweeps, or an absolute path; scheduler: address of a dask scheduler, a local cluster without it; workers:
    of the local cluster, 0 takes what cores and memory allow, and one where there is a GPU.
    """
    from filelock import FileLock, Timeout

    from jemlib import executor, study

    notebook = notebook.absolute()
    plan = cells(notebook, grid)
    check_table(notebook, table)
    declared = declared_in(notebook)
    places = None if data is None else str(absolute(data))
    if "data_dir" in declared:
        study.check_data(places or "")
    common = {"workers": 1, "force": force or None, "data_dir": places}
    common = {name: value for name, value in common.items() if value is not None and name in declared}
    store = Store(_folder(out), "sweep")
    try:
        with FileLock(store.dir / ".lock", timeout=0):
            for cell in plan if force else ():
                (store.dir / "cells" / cell.name / "cell.json").unlink(missing_ok=True)
            missing = [cell for cell in plan if record(store.dir, cell.name, table).get("status") != "done"]
            print(f"{len(plan)} cell{'s' * (len(plan) != 1)}, {len(plan) - len(missing)} finished before", flush=True)
            about = {"notebook": notebook.name, "grid": grid, "table": table}
            write_atomic(store.dir / "sweep.json", json.dumps(about, indent=2, default=str).encode())
            # what runs is a copy, so that nobody edits the notebook of a sweep that is under way
            write_atomic(store.dir / notebook.name, notebook.read_bytes())
            where = (str(store.dir), notebook.name, str(notebook.parent))
            jobs = [executor.Job(cell.name, *where, common | cell.given, table) for cell in missing]
            interrupted = False
            try:
                executor.run(jobs, scheduler, workers)
            except KeyboardInterrupt:
                interrupted = True
            rows = write(store, plan, table, grid)
    except Timeout:
        raise BlockingIOError(f"Another sweep is writing to {store.dir}.") from None
    status = rows.drop_duplicates("cell")["status"]
    raised, absent = ((status == name).sum() for name in STATUSES_WITHOUT_RESULT)
    ended = f"{len(plan) - raised - absent} of {len(plan)} cells done"
    ended += f", {raised} raised" * bool(raised) + f", {absent} not run" * bool(absent)
    print(f"{'interrupted: ' if interrupted else ''}{ended}: {store.dir / 'index.html'}", flush=True)
    return 130 if interrupted else int(bool(raised + absent))


def _folder(out: str | Path) -> Path:
    """The folder of a sweep; `ParameterError` where that would be in the way of something else."""
    home, out = repo_root() / "results" / "sweeps", Path(os.path.expanduser(out))
    folder = Path(os.path.normpath(home / out))
    if not out.is_absolute() and home not in folder.parents:
        raise ParameterError(f"'{out}' leaves results/sweeps; give a name, or an absolute path.")
    others = [path.name for path in folder.glob("[!.]*")] if folder.is_dir() else []
    if others and "sweep.json" not in others:
        raise ParameterError(f"{folder} holds something else than a sweep; choose another folder.")
    return folder


def record(root: Path, name: str, table: str) -> dict[str, Any]:
    """A cell's record; empty, so that the cell runs again, where it is not there, damaged or without its table."""
    folder = root / "cells" / name
    try:
        found = read_json(folder / "cell.json")
    except (FileNotFoundError, ResultsError):
        return {}
    there = found.get("status") != "done" or (folder / "tables" / f"{table}.csv").is_file()
    return found if there else {}


# --- results ------------------------------------------------------------------------------------------------


def write(store: Store, plan: Sequence[Cell], table: str, grid: Mapping[str, Sequence[Any]]) -> pd.DataFrame:
    """Table (CSV and Parquet), times, heatmap and page of a sweep as far as it is done; returns the table."""
    import io

    from jemlib import sweep_page

    rows = collect(store.dir, plan, table)
    store.table("sweep", rows)
    buffer = io.BytesIO()
    rows.to_parquet(buffer, index=False)
    write_atomic(store.dir / "tables" / "sweep.parquet", buffer.getvalue())
    records = [record(store.dir, cell.name, table) for cell in plan]
    times = [{"what": f"cell {r['cell']}", "seconds": r["seconds"], "threads": r["threads"]} for r in records if r]
    if times:
        store.timing(times)
    sweep_page.write(store, rows, [name for name, values in grid.items() if len(values) > 1])
    return rows


def collect(root: Path, plan: Sequence[Cell], table: str) -> pd.DataFrame:
    """The tidy table, in the grid's order: parameters, metrics, status, error, cell.

    A cell has the rows of its own table, one where it raised or was not run. Columns of a cell's table stand before
    equally named parameters, which may mean the first of several seeds only.
    """
    import pandas as pd

    rows = []
    for cell in plan:
        done = record(root, cell.name, table)
        end = {"status": "raised" if done else "not run", "error": done.get("error"), "cell": cell.name}
        if done.get("status") != "done":
            rows.append(cell.given | end)
            continue
        for row in read_csv(root / "cells" / cell.name / "tables" / f"{table}.csv").to_dict("records"):
            known = {name: value for name, value in row.items() if name not in cell.given or pd.notna(value)}
            rows.append(cell.given | known | end | {"status": row.get("status", "ok"), "error": None})
    frame = pd.DataFrame(rows)
    for name in frame:
        frame[name] = _of_one_kind(frame[name])
    last = ["status", "error", "cell"]
    given = list(plan[0].given)
    return frame[[*given, *(name for name in frame if name not in {*given, *last}), *last]]


def _of_one_kind(column: pd.Series) -> pd.Series:
    """A column of text beside numbers, from the grid and from tables: numbers where all values are, else text."""
    import pandas as pd

    if column.dropna().map(type).nunique() < 2:
        return column
    numbers = pd.to_numeric(column, errors="coerce")
    return numbers if numbers.notna().equals(column.notna()) else column.where(column.isna(), column.astype(str))


def counts(rows: pd.DataFrame, by: Sequence[str], quantities: Sequence[str] = ()) -> pd.DataFrame:
    """Per group, rows without a result left out: runs, those alive, their share, and medians over those alive."""
    rows = rows[~rows["status"].isin(STATUSES_WITHOUT_RESULT)]
    rows = rows.assign(alive=rows["status"] == "ok")
    groups = rows.groupby(list(by), sort=False, dropna=False)
    found = groups.agg(runs=("alive", "size"), alive=("alive", "sum"), share=("alive", "mean"))
    medians = rows[rows["alive"]].groupby(list(by), sort=False, dropna=False)[list(quantities)].median()
    return found.join(medians).reset_index()
