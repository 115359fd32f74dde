"""Do two results folders agree? Tables cell by cell, missing and extra artefacts, executed notebooks by nbdiff.

On one machine with the same versions a run is deterministic, and every cell must be equal. Elsewhere rounding differs
and training amplifies it: a number may then differ by `SPREADS` seed standard deviations where the reference has
several seeds, else by the tolerance of its column.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from jemlib.files import read_csv, read_notebook
from jemlib.results import Store

NBDIME_CONFIG = Path(__file__).parent / "nbdime" / "nbdime_config.json"
SPREADS = 4.0
#: measured column -> (absolute, relative) tolerance between machines; one that is not named has the last line's
TOLERANCES: dict[str, tuple[float, float]] = {
    "accuracy": (0.03, 0.0), "judge_accuracy": (0.03, 0.0),
    "class_agreement": (0.1, 0.0),
    "energy_gap": (2.0, 0.0),
    "auroc": (0.15, 0.0), "aupr": (0.15, 0.0), "fpr95": (0.3, 0.0),
    "ece": (0.05, 0.0), "ece_adaptive": (0.05, 0.0), "brier": (0.05, 0.0),
    "kl_to_prediction": (1e-5, 0.0),
    "value": (3.0, 0.0),  # accuracies in percent beside published numbers
    "alive": (1, 0.0), "runs_ok": (1, 0.0), "share": (0.34, 0.0),  # survivors among few seeds
    "": (0.02, 0.3),
}  # fmt: skip
#: what was set, not measured, although it is no whole number
SETTINGS = ("step_size", "lr", "reinit_prob", "max_rms_step", "uniform_share", "tolerance", "noise_std")
#: text that names a single run, and what ended it
_NO_KEYS = ("run", "status", "model", "cell", "error", "note", "source", "value")
#: notebooks alone: a benchmark's folder holds times
_NOTEBOOK = re.compile(r"\d\d_\w+")
#: columns that say how large a rounding error was, which no two machines share
ROUNDING = {("equations", "error")}
#: what must be the same for two runs to be equal to the last digit
CONDITIONS = ("versions", "device", "threads", "cpu")


@dataclass(frozen=True)
class Report:
    """What disagrees, one sentence each, and how the folders were compared."""

    differences: list[str]
    compared: str

    @property
    def agree(self) -> bool:
        return not self.differences


def compare(expected: Path, found: Path, notebooks: bool = True) -> Report:
    """Compare two results folders; ValueError where one holds no results.

    A notebook that neither folder has is left out. notebooks=False leaves the executed copies out.
    """
    stems = [_stems(folder) for folder in (expected, found)]
    differences, n_tables, n_cells, exact = [], 0, 0, []
    for stem in sorted(stems[0] | stems[1]):
        if stem not in stems[1] or stem not in stems[0]:
            differences.append(f"{stem} is {'missing' if stem in stems[0] else 'extra'}: only one folder has run it")
            continue
        ours, theirs = (Store(folder.absolute(), stem).manifest() for folder in (expected, found))
        same = all(key in ours and key in theirs and ours[key] == theirs[key] for key in CONDITIONS)
        exact += [stem] * same
        for kind, suffix in (("tables", "csv"), ("figures", "png")):
            names = [_present(folder, kind, suffix, about) for folder, about in ((expected, ours), (found, theirs))]
            differences += [f"{kind}/{name}.{suffix} is missing" for name in sorted(names[0] - names[1])]
            differences += [f"{kind}/{name}.{suffix} is extra" for name in sorted(names[1] - names[0])]
            if kind == "tables":
                for name in sorted(names[0] & names[1]):
                    tables = [folder / "tables" / f"{name}.csv" for folder in (expected, found)]
                    n_tables += 1
                    n_cells += read_csv(tables[0]).size
                    differences += _table(name, *tables, exact=same)
        if same and notebooks:
            differences += _executed(stem, expected, found)
    how = f"{n_tables} tables with {n_cells} cells; "
    how += f"to the last digit (same machine, threads and versions): {', '.join(exact) or 'none'}; "
    how += "the others within seed spread or column tolerance"
    return Report(differences, how)


def _stems(folder: Path) -> set[str]:
    stems = {path.stem for path in folder.glob("artefacts/*.json") if _NOTEBOOK.fullmatch(path.stem)}
    if not stems:
        raise ValueError(f"{folder} holds no results of a notebook: there is no artefacts/NN_*.json in it.")
    return stems


def _present(folder: Path, kind: str, suffix: str, manifest: dict) -> set[str]:
    return {name for name in manifest.get(kind, {}) if (folder / kind / f"{name}.{suffix}").is_file()}


def _table(name: str, expected: Path, found: Path, exact: bool) -> Iterator[str]:
    ours, theirs = (read_csv(path, dtype=str, keep_default_na=False) for path in (expected, found))
    if list(ours.columns) != list(theirs.columns):
        names = sorted(set(ours.columns) ^ set(theirs.columns)) or "their order"
        yield f"tables/{name}.csv: the columns differ: {names}"
        return
    if len(ours) != len(theirs):
        yield f"tables/{name}.csv: {len(ours)} rows expected, {len(theirs)} found"
        return
    numbers = read_csv(expected)
    keys = _keys(numbers)
    for column in ours:
        tolerance = np.zeros(len(ours)) if exact or column in keys else _tolerance(name, numbers, column)
        for row, (one, other) in enumerate(zip(ours[column], theirs[column], strict=True)):
            if not _equal(one, other, tolerance[row], column, exact):
                where = ", ".join(f"{key}={ours[key][row]}" for key in keys if key != column and ours[key][row])
                allowed = "" if column in keys else f", tolerance {tolerance[row]:.2g}"
                yield f"tables/{name}.csv row {row + 1} ({where}), {column}: {one} expected, {other} found{allowed}"


def _equal(one: str, other: str, tolerance: float, column: str, exact: bool) -> bool:
    if one == other:
        return True
    if exact:
        return False
    if column == "status":  # the step at which a run diverged moves with rounding; that it did, does not
        return one.split()[:1] == other.split()[:1]
    try:
        return abs(float(one) - float(other)) <= tolerance
    except ValueError:  # text, or an empty cell on one side
        return False


def _keys(table: pd.DataFrame) -> list[str]:
    """The columns that say what a row is about, settings and budgets included; all others were measured."""
    kinds = pd.api.types
    whole = [c for c in table if kinds.is_integer_dtype(table[c]) and c not in TOLERANCES and c != "diverged_at"]
    text = [c for c in table if not kinds.is_numeric_dtype(table[c]) and c not in _NO_KEYS]
    return [c for c in table if c in (*whole, *text, *SETTINGS)]


def _tolerance(name: str, table: pd.DataFrame, column: str) -> np.ndarray:
    """Allowed difference of each row between machines: `SPREADS` seed deviations, or the column's own tolerance."""
    if (name, column) in ROUNDING or column == "diverged_at":
        return np.full(len(table), np.inf)
    values = pd.to_numeric(table[column], errors="coerce")
    absolute, relative = TOLERANCES.get(column, TOLERANCES[""])
    allowed = absolute + relative * values.abs()
    group = [key for key in _keys(table) if key not in ("seed", "diverged_at")]
    if "seed" in table and group:
        parts = [table[key] for key in group]
        seeds = table.groupby(parts, sort=False, dropna=False)["seed"].transform("nunique")
        spread = SPREADS * values.groupby(parts, sort=False, dropna=False).transform("std")
        allowed = allowed.where((seeds < 2) | spread.isna(), spread)
    return allowed.fillna(0.0).to_numpy()


def _executed(stem: str, expected: Path, found: Path) -> list[str]:
    """One sentence where nbdime, with the shipped configuration, sees the executed copies differ."""
    from nbdime.diffing.notebooks import diff_notebooks, set_notebook_diff_ignores
    from nbdime.prettyprint import PrettyPrintConfig, pretty_print_notebook_diff

    copies = [folder / "notebooks" / f"{stem}.ipynb" for folder in (expected, found)]
    if not all(path.is_file() for path in copies):
        return []
    set_notebook_diff_ignores(json.loads(NBDIME_CONFIG.read_text())["Diff"]["Ignore"])
    ours, theirs = map(read_notebook, copies)
    text = io.StringIO()
    told = PrettyPrintConfig(out=text, use_color=False, use_git=False, use_diff=False)
    pretty_print_notebook_diff(*map(str, copies), ours, diff_notebooks(ours, theirs), told)
    places = [line.removeprefix("## ").rstrip(":") for line in text.getvalue().splitlines() if line.startswith("## ")]
    said = ", ".join(places[:4]) + (" ..." if len(places) > 4 else "")
    return [f"notebooks/{stem}.ipynb: nbdiff: {said}"] if places else []
