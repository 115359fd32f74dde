"""The study's headline tables, read off a results folder: mean and spread over seeds, n and endings stated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from jemlib.config import TrainConfig
from jemlib.files import read_csv, read_json

_TABLES = {
    "mnist_methods": ("MNIST", ["accuracy", "nll", "energy_gap", "class_agreement", "frechet", "frechet_buffer"]),
    "cifar10_methods": ("CIFAR-10", ["accuracy", "nll", "energy_gap", "class_agreement", "frechet", "frechet_buffer"]),
    "toy_methods": ("Toy, exact figures in nats", ["kl_nats", "kl_to_optimum", "mi_nats"]),
}


@dataclass(frozen=True)
class Headline:
    """One table as text, ready for Markdown or HTML. about: data, network, budget, commit and machine, or empty."""

    title: str
    about: str
    columns: list[str]
    rows: list[list[str]]


def tables(folder: Path) -> list[Headline]:
    """The headline tables that the folder has. A row's numbers are over its runs that did not diverge, if any."""
    found = []
    for name, (title, columns) in _TABLES.items():
        path = folder / "tables" / f"{name}.csv"
        if path.is_file():
            table = read_csv(path)
            found.append(Headline(title, about(folder, table), *summary(table, columns)))
    return found


def summary(table: pd.DataFrame, columns: list[str]) -> tuple[list[str], list[list[str]]]:
    """Head and rows, as text, of a table of runs: one row a method (and whatever else tells runs apart)."""
    keys = [key for key in ("dataset", "setting", "sampler", "method", "variant") if key in table]
    rows = [_row(key, part, columns) for key, part in table.groupby(keys, sort=False)]
    return [*keys, *columns, "seeds", "status"], rows


def _row(key: object, part: pd.DataFrame, columns: list[str]) -> list[str]:
    statuses = part["status"].value_counts()
    status = ", ".join(f"{n} {name}" if len(part) > 1 else name for name, n in statuses.items())
    alive = part[part["status"] == "ok"]  # a diverged run's numbers are those of its last good checkpoint
    cells = [_cell((alive if len(alive) else part)[column]) for column in columns]
    return [*map(str, key if isinstance(key, tuple) else (key,)), *cells, str(len(part)), status]


def _cell(values: pd.Series) -> str:
    found = values.dropna()
    if found.empty:
        return "–"
    deviation = found.std() if found.std() >= 5e-4 else 0.0  # below the last digit of the mean
    spread = f" ± {deviation:.2g}" if len(found) > 1 else ""
    return f"{found.mean():.3g}{spread}" if abs(found.mean()) >= 1 else f"{found.mean():.3f}{spread}"


def about(folder: Path, table: pd.DataFrame) -> str:
    """Where a table's runs come from: data, network, budget, commit and machine, off the records they name."""
    if "run" not in table:
        return ""
    named = table[table["method"] != "oracle"] if "method" in table else table  # which samples nothing
    path = folder / "runs" / f"{named['run'].iloc[-1]}.json"
    if not path.is_file():
        return "the run records are missing"
    record = read_json(path)
    config, commit = record["config"], (record["commit"] or "unknown")[:10]
    threads = f"{record['threads']} CPU thread{'s' if record['threads'] > 1 else ''}"
    each = f"{config['batch_size']} {'points' if config['network'] == 'mlp' else 'images'}"
    budget = f"{config['n_iterations']} iterations of {each} and {config['n_steps']} SGLD steps"
    if "n_frechet" in table:
        budget += f", {table['n_frechet'].max()} fresh chains"
    if "n_test" in table:
        budget += f", {table['n_test'].max():,} test images, a judge of {table['judge_accuracy'].max():.1%} accuracy"
    where = f"commit {commit}{', changed' if record['dirty'] else ''}, {threads}, {record['cpu']}"
    return f"{record['data']['source']}, {TrainConfig(**config).network_name()}, {budget} ({where})"


# --- one measured sentence a notebook -----------------------------------------------------------------------


def toy(medians: pd.DataFrame, failed: pd.DataFrame) -> str:
    """Of `toy_runs.summary` and the runs with a failed sampler: distances, and who diverged."""
    here = medians[medians["dataset"] == medians["dataset"].iloc[0]].set_index("method")
    said = [f"{name} {here.loc[name, 'kl_nats']:.3f}" for name in ("oracle", "jem", "st_jem") if name in here.index]
    own = ""
    if "st_jem" in here.index:
        own = f"; st_jem is {here.loc['st_jem', 'kl_to_optimum']:.3f} nats from its own optimum"
    lost = list(dict.fromkeys(failed.loc[failed["status"] != "ok", "method"]))
    n = f", medians of {int(here['runs'].max())} seeds" if "runs" in here else ""
    return f"KL to the data in nats{n}: {', '.join(said)}{own}. With noise as samples {_lost(lost)}."


def methods(table: pd.DataFrame) -> str:
    """Of a methods' table: test accuracies, and who diverged."""
    means = table.groupby("method", sort=False)["accuracy"].mean()
    said = ", ".join(f"{name} {100 * value:.1f}%" for name, value in means.items())
    lost = list(dict.fromkeys(table.loc[table["status"] != "ok", "method"]))
    return f"{table['data_source'].iloc[0]}, test accuracy: {said}; {_lost(lost)}."


def ablation(table: pd.DataFrame) -> str:
    """Of the ablation's runs: how many each arm lost, over all settings of all data sets."""
    lost = (table["status"] != "ok").groupby(table["arm"], sort=False)
    said = ", ".join(f"{arm} {int(part.sum())} of {len(part)}" for arm, part in lost)
    return f"Runs lost over {len(table[['dataset', 'setting']].drop_duplicates())} sampler settings: {said}."


def detection(calibrated: pd.DataFrame, detected: pd.DataFrame) -> str:
    """Of the calibration and OOD tables: the first data set's ECE before scaling, and mean AUROC of log p(x).

    Diverged runs are left out.
    """
    name = detected["in_dataset"].iloc[0]
    chosen = (detected["in_dataset"] == name) & (detected["score"] == "log_px") & (detected["status"] == "ok")
    here = detected[chosen]
    auroc = here.groupby("method", sort=False)["auroc"].mean()
    unscaled = calibrated["scaling"] == calibrated["scaling"].iloc[0]
    ece = calibrated[calibrated["model"].isin(here["model"]) & unscaled].groupby("method", sort=False)["ece"].mean()
    said = ", ".join(f"{method} {ece[method]:.3f} and {auroc[method]:.2f}" for method in auroc.index if method in ece)
    n = here["ood_dataset"].nunique()
    return f"{name}, ECE before scaling and mean AUROC of log p(x) over {n} OOD sets: {said}."


def _lost(methods: list[str]) -> str:
    if not methods:
        return "no run diverged"
    return f"{' and '.join([', '.join(methods[:-1]), methods[-1]] if len(methods) > 1 else methods)} diverged"
