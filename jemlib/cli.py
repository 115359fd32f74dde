"""`python -m jemlib ...`: the command line."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

import jemlib

PROFILES = ["smoke", "quick", "full", "paper"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(jemlib.__version__, prog_name="jemlib")
def main() -> None:
    """A reproducible study of stabilized training of joint energy-based models."""


@main.command()
@click.option("--profile", type=click.Choice(PROFILES), default="quick", show_default=True)
@click.option("--only", metavar="01,02", help="Notebooks by number or name, comma-separated; all without it.")
@click.option("--seed", type=click.IntRange(min=0), help="Replaces the seed of every notebook.")
@click.option("--force", is_flag=True, help="Train again what is already trained.")
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the data sets.")
@click.option("--out", type=click.Path(path_type=Path), help="Results folder; results/PROFILE without it.")
def run(profile: str, only: str | None, seed: int | None, force: bool, data: Path | None, out: Path | None) -> None:
    """Run the chain of notebooks and write results/PROFILE/."""
    from jemlib import study  # heavy imports only where they are needed

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that is ended shuts its kernel down like Ctrl-C
    try:
        code = study.run(profile=profile, only=only, seed=seed, force=force, data=data, out=out)
    except ValueError as error:  # a wrong notebook or parameter, before anything ran
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(code)


@main.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lab(arguments: tuple[str, ...]) -> None:
    """Open JupyterLab on the notebooks, with this environment's kernel."""
    from jemlib import study

    sys.exit(study.lab(arguments))


@main.command()
def readme() -> None:
    """Write the README's numbers from results/reference."""
    from jemlib import readme as writer

    print("README.md changed" if writer.update() else "README.md is up to date")
