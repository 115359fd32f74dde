"""`python -m jemlib ...`: the command line."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

import jemlib
from jemlib.parameters import ParameterError

PROFILES = ["smoke", "quick", "hour", "full", "paper"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(jemlib.__version__, prog_name="jemlib")
def main() -> None:
    """A reproducible study of stabilized training of joint energy-based models."""


@main.command()
@click.option("--profile", type=click.Choice(PROFILES), default="quick", show_default=True)
@click.option("--only", metavar="01,02", help="Notebooks by number or name, comma-separated; all without it.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="Replaces the seed of every notebook.")
@click.option("--force", is_flag=True, help="Train again what is already trained.")
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the data sets.")
@click.option("--out", type=click.Path(path_type=Path), help="Results folder; results/PROFILE without it.")
def run(profile: str, only: str | None, seed: int | None, force: bool, data: Path | None, out: Path | None) -> None:
    """Run the chain of notebooks and write results/PROFILE/."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that is ended shuts its kernel down like Ctrl-C
    try:
        from jemlib import study  # heavy imports only where they are needed

        code = study.run(profile=profile, only=only, seed=seed, force=force, data=data, out=out)
    except ParameterError as error:  # before anything ran
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:  # outside a notebook; in one the run ends in order
        code = _interrupted()
    sys.exit(code)


def _interrupted() -> int:
    print("interrupted", file=sys.stderr, flush=True)
    return 130


@main.command()
@click.argument("notebook", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--grid", "grids", multiple=True, metavar="NAME=V1,V2", help="Values of a parameter; may be repeated.")
@click.option("--seeds", metavar="0-2", help="Values of the parameter seed: 0-2 or 0,3.")
@click.option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Grid and seeds as YAML.")
@click.option("--out", metavar="NAME", help="Folder under results/sweeps; the notebook's name without it.")
@click.option("--table", help="The notebook's table whose rows are collected; sweep_row without it.")
@click.option("--scheduler", metavar="tcp://HOST:PORT", help="A running dask scheduler; a local cluster without it.")
@click.option(
    "--workers", type=click.IntRange(min=0), default=0, help="Of the local cluster; one a core, or a GPU, without it."
)
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the data sets.")
@click.option("--force", is_flag=True, help="Run finished cells again.")
def sweep(
    notebook: Path,
    grids: tuple[str, ...],
    seeds: str | None,
    file: Path | None,
    out: str | None,
    table: str | None,
    **options: Any,
) -> None:
    """Run a notebook for every cell of a grid, on the cores of this machine or on a dask cluster.

    Finished cells are skipped, so the same command continues. Exit code 0: every cell is done.
    """
    try:
        from jemlib import sweep as sweeps

        grid, seeds_there = sweeps.read_file(file) if file else ({}, None)
        typed = sweeps.parse_grid(grids)
        if seeds is not None and "seed" in typed:
            raise ParameterError("The seed is given twice: with --seeds and with --grid.")
        text = seeds_there if seeds is None else seeds
        grid |= typed  # the command line wins
        if text is not None and "seed" not in typed:
            grid["seed"] = sweeps.parse_seeds(text)
        code = sweeps.run(notebook, grid, out or notebook.stem, table=table or sweeps.TABLE, **options)
    except ParameterError as error:  # before anything ran
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:  # before the first cell
        code = _interrupted()
    sys.exit(code)


@main.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lab(arguments: tuple[str, ...]) -> None:
    """Open JupyterLab on the notebooks, with this environment's kernel."""
    from jemlib import study

    sys.exit(study.lab(arguments))


@main.command()
@click.argument("expected", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("found", type=click.Path(exists=True, file_okay=False, path_type=Path))
def compare(expected: Path, found: Path) -> None:
    """Tell whether two results folders agree; exit 1 where they do not."""
    from jemlib import compare as gate

    try:
        report = gate.compare(expected, found)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    print(*report.differences, sep="\n", end="\n" if report.differences else "")
    n = len(report.differences)
    verdict = "agree" if report.agree else f"{n} difference{'s' if n > 1 else ''}"
    print(f"{verdict}: {report.compared}")
    sys.exit(0 if report.agree else 1)


@main.command()
@click.option("--networks", metavar="NAME,...", help="Of the suite's networks, comma-separated; all without it.")
@click.option("--precision", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads; torch's default without it.")
@click.option("--growth/--no-growth", default=True, help="Also how times grow with batch, steps, width and threads.")
@click.option("--savings", is_flag=True, help="Also train with fewer steps and other starts on MNIST.")
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the data sets, for --savings.")
@click.option("--out", type=click.Path(path_type=Path), default="results/benchmark", show_default=True)
def benchmark(
    networks: str | None, precision: str, threads: int | None, growth: bool, savings: bool, data: Path | None, out: Path
) -> None:
    """Time an SGLD step and a training iteration against JEM written the usual way."""
    import torch

    from jemlib import benchmark as bench
    from jemlib import data as datasets
    from jemlib import savings as options
    from jemlib.checkpoints import CheckpointError
    from jemlib.files import absolute
    from jemlib.results import Store

    names = [name.strip() for name in networks.split(",")] if networks else list(bench.CASES)
    for name in names:
        if name not in bench.CASES:
            raise click.UsageError(f"There is no network '{name}' in the suite; there are {', '.join(bench.CASES)}.")
    if threads:
        torch.set_num_threads(threads)
    try:
        digits = datasets.mnist(data or "", n_val=5000) if savings else None  # missing data are told before the suite
        given = {"networks": ",".join(names), "precision": precision, "threads": torch.get_num_threads()}
        store = Store(absolute(out), "benchmark", given | {"growth": growth, "savings": savings})
        bench.suite(store, names, precision, growth=growth)
        if digits is not None:
            options.compare(store, digits)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines() or ["it said nothing"]
        message = f"The process that measures memory ended with exit code {error.returncode}: {said[-1]}"
        raise click.ClickException(message) from error
    except (OSError, datasets.DataError, CheckpointError) as error:
        raise click.ClickException(str(error)) from error
    print(f"done: {store.dir / 'tables' / 'benchmark.csv'}")


@main.command()
def readme() -> None:
    """Write the README's numbers from results/reference."""
    from jemlib import readme as writer

    try:
        changed = writer.update()
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    print("README.md changed" if changed else "README.md is up to date")
