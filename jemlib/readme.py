"""The README's numbers, written from a results folder: none of them is typed in."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from jemlib import headlines, step_profile
from jemlib.files import read_csv, write_atomic
from jemlib.provenance import repo_root

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
    parts = _headlines(reference)
    longer = reference.with_name(f"{reference.name}_hour")
    if longer.is_dir():
        parts += ["With more iterations (profile `hour`):", *_headlines(longer)]
    timing = reference / "tables" / "timing.csv"
    if timing.is_file():
        parts += [_times(read_csv(timing))]
    benchmark = reference / "tables" / "benchmark.csv"
    if benchmark.is_file():
        parts += [_speed(read_csv(benchmark))]
    made_of = reference / "tables" / "benchmark_parts.csv"
    if made_of.is_file():
        parts += [_parts(read_csv(made_of))]
    savings = reference / "tables" / "benchmark_savings.csv"
    if savings.is_file():
        parts += [_savings(reference, read_csv(savings))]
    return "\n\n".join(parts)


def _headlines(folder: Path) -> list[str]:
    parts = []
    for table in headlines.tables(folder):
        about = f": {table.about}" if table.about else ""
        parts += [f"**{table.title}**{about}", _markdown(table.columns, table.rows)]
    return parts


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _times(timing: pd.DataFrame) -> str:
    """How long the notebooks took, as the timing table says."""
    rows = timing[timing["what"].str.startswith("notebook ")]
    if rows.empty:
        return ""
    said = ", ".join(
        f"{what.removeprefix('notebook ')} {seconds:.0f} s" for what, seconds in rows[["what", "seconds"]].values
    )
    return f"Measured times of the notebooks, without the installation: {said}; together {rows['seconds'].sum():.0f} s."


def _speed(table: pd.DataFrame) -> str:
    """Ours against the plain iteration, as the benchmark measured them in one run."""
    rows = []
    for row in table.to_dict("records"):
        size = f"{row['batch']} × {row['n_steps']}" if row["what"] == "iteration" else f"{row['batch']}"
        memory = "–" if pd.isna(row["memory_ratio"]) else f"{row['memory_ratio']:.2f}"
        times = [f"{row[key]:.4g}" for key in ("plain_ms", "ours_ms")]
        rows.append([
            row["network"], row["what"], size, row["precision"], *times, f"{row['ratio']:.2f}",
            f"{row['images_steps_per_s']:.3g}", f"{row['gflops']:.3g}", f"{row['share_of_peak']:.0%}", memory,
        ])  # fmt: skip
    head = [
        "network", "what", "batch × steps", "precision", "plain, ms", "ours, ms", "plain / ours", "images × steps / s",
        "GFLOP/s, ours", "of the peak, ours", "memory, ours / plain",
    ]  # fmt: skip
    devices, threads, commits = (", ".join(map(str, table[key].unique())) for key in ("device", "threads", "commit"))
    about = "JEM's iteration written the usual way (float32) against ours, taking turns in one run"
    gpu = "" if table["gpu"].any() else " Figures on CUDA are not measured yet."
    return f"**Speed**: {about} ({devices}, {threads} threads, commit {commits}).{gpu}\n\n{_markdown(head, rows)}"


def _parts(table: pd.DataFrame) -> str:
    """What the time of an SGLD step is made of."""
    kinds = [*step_profile.KINDS, "the rest"]
    rows = [
        [row["network"], row["precision"], *(f"{row[kind]:.0%}" for kind in kinds)] for row in table.to_dict("records")
    ]
    about = "shares of the time of our SGLD step, under torch's profiler, which lengthens the small ones"
    return f"**What a step is made of**: {about}\n\n{_markdown(['network', 'precision', *kinds], rows)}"


def _savings(reference: Path, table: pd.DataFrame) -> str:
    """What the options that save work change in the result."""
    columns = ["accuracy", "energy_gap", "class_agreement", "frechet", "frechet_buffer"]
    about = f"ST-JEM with one option changed; {headlines.about(reference, table)}"
    return f"**Saving work**: {about}\n\n{_markdown(*headlines.summary(table, columns))}"
