"""The README's numbers, written from a results folder: none of them is typed in."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from jemlib import headlines
from jemlib.results import repo_root, write_atomic

START = "<!-- results: written by `python -m jemlib readme`, from results/reference -->"
END = "<!-- end of results -->"


def update(readme: Path | None = None, reference: Path | None = None) -> bool:
    """Rewrite the part of the README between the markers; whether that changed it.

    Raises ValueError where the markers are missing.
    """
    readme = readme or repo_root() / "README.md"
    text = readme.read_text()
    if START not in text or END not in text:
        raise ValueError(f"{readme} lacks the lines {START!r} and {END!r}")
    head, rest = text.split(START)
    _, tail = rest.split(END)
    new = f"{head}{START}\n{render(reference or repo_root() / 'results' / 'reference')}\n{END}{tail}"
    if new != text:
        write_atomic(readme, new.encode())
    return new != text


def render(reference: Path) -> str:
    """Markdown of the headline tables and times of a results folder."""
    parts = []
    for table in headlines.tables(reference):
        parts += [f"**{table.title}**{f': {table.about}' if table.about else ''}"]
        lines = [table.columns, ["---"] * len(table.columns), *table.rows]
        parts += ["\n".join("| " + " | ".join(line) + " |" for line in lines)]
    timing = reference / "tables" / "timing.csv"
    if timing.is_file():
        parts += [_times(pd.read_csv(timing))]
    return "\n\n".join(parts)


def _times(timing: pd.DataFrame) -> str:
    """How long the notebooks took, as the timing table says."""
    rows = timing[timing["what"].str.startswith("notebook ")]
    if rows.empty:
        return ""
    said = ", ".join(
        f"{what.removeprefix('notebook ')} {seconds:.0f} s" for what, seconds in rows[["what", "seconds"]].values
    )
    return f"Measured times of the notebooks, without the installation: {said}; together {rows['seconds'].sum():.0f} s."
