"""Where training survives: the same runs over a grid of sampler settings, counted, and the prediction beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from jemlib import evaluation, exact, runs, sweep, toy_runs
from jemlib.config import TrainConfig
from jemlib.data import Dataset
from jemlib.exact import Space
from jemlib.files import read_csv
from jemlib.parallel import Task, train_all
from jemlib.provenance import repo_root
from jemlib.results import Store
from jemlib.toy import Toy
from jemlib.training import FitResult

SETTING = ["lr", "n_steps", "step_size"]
#: what all toy runs have in common; Equation (5) itself: the noise is the square root of the step
TOY: dict[str, Any] = {
    "network": "mlp", "depth": 2, "input_scale": 5.0, "beta1": 0.9, "at_bounds": "reflect", "buffer_size": 2000,
    "reinit_prob": 0.01, "log_every": 20, "checkpoint_every": 20, "device": "cpu",
}  # fmt: skip
#: the same for images, where the noise is set apart from the step
IMAGES: dict[str, Any] = {
    "network": "conv_net", "warmup": 50, "input_noise": 0.03, "noise_std": 0.01, "buffer_size": 5000, "log_every": 50,
}  # fmt: skip


def toy_config(n_iterations: int, **given: Any) -> TrainConfig:
    """A toy run: the learning rate falls after half and after 80 % of the iterations. given: of `TrainConfig`."""
    decay_at = (n_iterations // 2, n_iterations * 8 // 10)
    return TrainConfig(**(TOY | {"n_iterations": n_iterations, "decay_at": decay_at} | given))


def image_config(**given: Any) -> TrainConfig:
    """A run on images. given: of `TrainConfig`."""
    return TrainConfig(**(IMAGES | given))


def grid(**axes: str) -> list[dict[str, str]]:
    """Every combination of comma-separated values, the last name fastest; `TrainConfig` types and checks them."""
    values = [[part.strip() for part in text.split(",") if part.strip()] for text in axes.values()]
    return [dict(zip(axes, chosen, strict=True)) for chosen in product(*values)]


def toy(store: Store, data: Dataset, configs: Sequence[TrainConfig], n: int, **options: Any) -> pd.DataFrame:
    """Train every config on a toy distribution; a row a run, with exact KL(p_data || p) in nats on an n x n grid.

    options: as of `parallel.train_all`.
    """
    space = Space.grid(n)
    log_data = exact.log_joint(Toy(data.name).log_joint(space.points), space.log_mass)
    reference = toy_runs.Reference(space, log_data, None)
    rows = []
    for name, result in train_all(store, [Task(data, config, {"lines": 0}) for config in configs], **options):
        scores = {"kl_nats": reference.score(result.model)["kl_nats"]}
        runs.add_metrics(store, name, scores)
        rows.append(_row(data, name, result) | scores)
    return pd.DataFrame(rows)


def images(store: Store, data: Dataset, configs: Sequence[TrainConfig], **options: Any) -> pd.DataFrame:
    """Train every config on images; a row a run. options: as of `parallel.train_all`."""
    trained = train_all(store, [Task(data, config, {"lines": 0}) for config in configs], **options)
    return pd.DataFrame([_row(data, name, result) for name, result in trained])


def _row(data: Dataset, name: str, result: FitResult) -> dict[str, Any]:
    config, last = result.config, result.history[-1]
    setting = {key: getattr(config, key) for key in ("method", "lr", "n_steps", "step_size", "seed")}
    end = {"status": result.status, "diverged_at": result.diverged_at, "n_iterations": config.n_iterations, "run": name}
    monitors = {key: last.get(key, math.nan) for key in ("energy_gap", "gradient_norm")}
    return {"dataset": data.name} | setting | evaluation.classification(result.model, data.test) | monitors | end


def read(path: str | Path) -> tuple[pd.DataFrame, int]:
    """(rows that have a result, number of those without) of a sweep's table of the toy cell.

    A relative path counts from the repository. ValueError where the table has not the columns of `toy`.
    """
    rows = read_csv(repo_root() / Path(path).expanduser())
    needed = [
        "dataset",
        "method",
        "lr",
        "n_steps",
        "step_size",
        "seed",
        "n_iterations",
        "kl_nats",
        "accuracy",
        "status",
    ]
    if missing := [name for name in needed if name not in rows]:
        raise ValueError(f"{path} is no sweep of the toy cell: it has no column {', '.join(missing)}")
    without = rows["status"].isin(sweep.STATUSES_WITHOUT_RESULT)
    # the records and cells are those of the sweep's folder
    rows = (
        rows[~without]
        .astype({"n_steps": int, "seed": int, "n_iterations": int})
        .drop(columns=["run", "cell"], errors="ignore")
    )
    return rows.reset_index(drop=True), int(without.sum())


def counts(rows: pd.DataFrame) -> pd.DataFrame:
    """`sweep.counts` by data set, method and setting, with median KL and accuracy; `panel` names method and lr."""
    found = sweep.counts(rows, ["dataset", "method", *SETTING], ["kl_nats", "accuracy"])
    several = found["lr"].nunique() > 1
    found["panel"] = found["method"] + (", lr " + found["lr"].map("{:g}".format) if several else "")
    # a row of panels each learning rate, the data sets in their order
    rank = [pd.factorize(found["dataset"])[0], found["lr"]]
    return found.iloc[np.lexsort(rank[::-1])].reset_index(drop=True)


def region(counts: pd.DataFrame, dies: str = "jem", lives: str = "st_jem") -> pd.DataFrame:
    """Settings at which one method lost at least half of its runs and the other none, with the counts of both.

    counts: as of `sweep.counts` by dataset, method, lr, n_steps and step_size.
    """
    keys = ["dataset", *SETTING]
    both = [counts.loc[counts["method"] == name, [*keys, "alive", "runs"]] for name in (dies, lives)]
    side = both[0].merge(both[1], on=keys, suffixes=(f"_{dies}", f"_{lives}"))
    dead = 2 * side[f"alive_{dies}"] <= side[f"runs_{dies}"]
    return side[dead & (side[f"alive_{lives}"] == side[f"runs_{lives}"])].reset_index(drop=True)


def marked(counts: pd.DataFrame, region: pd.DataFrame) -> pd.DataFrame:
    """The cells of `counts`, of every method, whose setting lies in the region."""
    return counts.merge(region[["dataset", *SETTING]], on=["dataset", *SETTING])


def sentence(counts: pd.DataFrame, region: pd.DataFrame, dies: str = "jem", lives: str = "st_jem") -> str:
    """Per data set, one sentence: whether there is a region, and where it lies."""
    said = []
    for dataset, part in counts.groupby("dataset", sort=False):
        inside = region[region["dataset"] == dataset]
        n = len(part.drop_duplicates(SETTING))
        if inside.empty:
            said.append(f"{dataset}: at none of {n} settings did {dies} lose half of its runs and {lives} none.")
            continue
        lost, all_lost = ((inside[f"runs_{dies}"] - inside[f"alive_{dies}"]).sum(), inside[f"runs_{dies}"].sum())
        said.append(
            f"{dataset}: at {len(inside)} of {n} settings {dies} lost at least half of its runs ({lost} of {all_lost}) "
            f"and {lives} none of {inside[f'runs_{lives}'].sum()}: "
            + "; ".join(_setting(row) for row in inside.to_dict("records")) + "."
        )  # fmt: skip
    return "\n".join(said)


def beside_prediction(counts: pd.DataFrame, predicted: pd.DataFrame, dies: str = "jem", lives: str = "st_jem") -> str:
    """Two measured sentences: `lives` against `predictions` of it, and how far off the survivors of `dies` are.

    Of the settings with exact KL, medians over seeds.
    """
    exact_ones = counts.dropna(subset=["kl_nats"])
    ours, theirs = (exact_ones.loc[exact_ones["method"] == name, "kl_nats"] for name in (lives, dies))
    bounds = predicted.loc[predicted["method"] == lives, "kl_nats"].dropna()
    said = (
        f"{lives}, {len(ours)} settings: {ours.min():.3f} to {ours.max():.3f} nats from the data, predicted "
        f"{bounds.min():.3f} to {bounds.max():.3f}; {(ours > bounds.max()).sum()} settings lie above that.\n"
    )
    side = exact_ones.pivot_table("kl_nats", SETTING, "method")
    closer = (side[dies] < side[lives]).sum() if {dies, lives} <= set(side) else 0
    far = (theirs > 1).sum()
    return said + (
        f"{dies}, {len(theirs)} settings with survivors: in {far} they are more than 1 nat from the data; "
        f"in {closer} they are nearer than {lives}."
    )


def verdict(counts: pd.DataFrame) -> pd.DataFrame:
    """Per data set and method: runs, survivors, cells that lost at least half, its best and worst live cell.

    Judged by kl_nats where it is known, else by accuracy.
    """
    rows = []
    for (dataset, method), part in counts.groupby(["dataset", "method"], sort=False):
        exactly = part["kl_nats"].notna().any()
        quantity = "kl_nats" if exactly else "accuracy"
        alive = part.dropna(subset=[quantity]).sort_values(quantity, ascending=exactly).to_dict("records")
        ends = [f"{cell[quantity]:.3g} ({_setting(cell)})" for cell in (alive[:1] + alive[-1:])] or ["none"] * 2
        rows.append({
            "dataset": dataset, "method": method, "runs": part["runs"].sum(), "alive": part["alive"].sum(),
            "cells": len(part), "cells that lost half": int((2 * part["alive"] <= part["runs"]).sum()),
            "judged by": quantity, "best": ends[0], "worst": ends[1],
        })  # fmt: skip
    return pd.DataFrame(rows)


def _setting(cell: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {cell[name]:g}" for name in SETTING)


def predictions(distribution: str, methods: Iterable[str], n: int) -> pd.DataFrame:
    """What infinitely many samples would lead to, by method and sampler: KL(p_data || p) of the optimum, in nats.

    nan where there is no stationary point: energies grow until the run has diverged.
    """
    rows = []
    for method, (sampler, n_steps) in product(methods, {"perfect": 1, "failed: uniform noise": 0}.items()):
        reference = toy_runs.reference(distribution, method, toy_config(1, method=method, n_steps=n_steps), n)
        found = math.nan
        if reference.log_optimum is not None:
            found = float(exact.kl(reference.log_data, reference.log_optimum, reference.space.log_mass))
        rows.append({"method": method, "sampler": sampler, "kl_nats": found})
    return pd.DataFrame(rows)
