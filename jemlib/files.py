"""Files of a results folder: JSON that is valid whatever a diverged run produced, whole files or none, damage named.

Everything is written to a temporary file beside its target and moved into place, so a reader (or a run that
is killed) never meets half a file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from nbformat import NotebookNode


class ResultsError(OSError):
    """The results folder cannot be used; the message says which path and why."""


DAMAGED = "{} is damaged: delete it and run the same command again."
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _plain(value: Any) -> Any:
    """Plain JSON types; non-finite numbers, which JSON lacks, become "NaN", "Infinity" or "-Infinity"."""
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays alike
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Path):
        return str(value)
    return value


def restored(value: Any) -> Any:
    """What `as_json` was given: words that stand for non-finite numbers become these again."""
    if isinstance(value, dict):
        return {key: restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restored(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file of a results folder holds; `ResultsError` that names it where it is damaged."""
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ResultsError(DAMAGED.format(path)) from error


def read_csv(path: Path, **options: Any) -> pd.DataFrame:
    """A table of a results folder; `ResultsError` that names it where it is damaged. options: of `pandas.read_csv`."""
    import pandas as pd

    try:
        return pd.read_csv(path, **options)
    except ValueError as error:  # pandas' own are, and what is no UTF-8
        raise ResultsError(DAMAGED.format(path)) from error


def read_notebook(path: Path) -> NotebookNode:
    """An executed notebook of a results folder; `ResultsError` that names it where it is damaged."""
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except (ValueError, TypeError, AttributeError, nbformat.ValidationError) as error:  # no JSON, or of something else
        raise ResultsError(DAMAGED.format(path)) from error


def as_json(content: Mapping[str, Any]) -> bytes:
    """Content as indented JSON with sorted keys, the same bytes for the same content."""
    text = json.dumps(_plain(content), indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)
    return (text + "\n").encode()


def absolute(path: str | Path) -> Path:
    """A path as a user gave it, from the working folder, `~` read as the home folder."""
    # pathlib's expanduser raises RuntimeError for the ~ of an unknown user; here that is a name like others
    return Path(os.path.expanduser(path)).absolute()


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; `ResultsError` where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultsError(f"Cannot make the results folder {folder}: {error.strerror}.") from error


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; `ResultsError` where that fails."""
    make_folder(path.parent)
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # else a crash of the machine may leave an empty file under the new name
        os.replace(temporary, path)
    except OSError as error:
        raise ResultsError(f"Cannot write {path}: {error.strerror}.") from error
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what processes left half-written when they were killed: temporary files whose process is gone.

    For the one run that holds the folder's lock: the process may live on another machine otherwise.
    """
    import psutil

    for path in folder.rglob(".*.tmp"):
        pid = path.name.split(".")[-2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            path.unlink(missing_ok=True)
