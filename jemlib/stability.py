"""Where training survives: the same runs over a grid of sampler settings, counted, and the prediction beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from jemlib import evaluation, exact, runs, toy_runs
from jemlib.config import TrainConfig
from jemlib.data import Dataset
from jemlib.exact import Space
from jemlib.parallel import Task, train_all
from jemlib.results import Store, repo_root
from jemlib.sweep import STATUSES_WITHOUT_RESULT
from jemlib.toy import Toy
from jemlib.training import FitResult

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
    rows = pd.read_csv(repo_root() / Path(path).expanduser())
    needed = ["dataset", "method", "lr", "n_steps", "step_size", "seed", "kl_nats", "accuracy", "status"]
    if missing := [name for name in needed if name not in rows]:
        raise ValueError(f"{path} is no sweep of the toy cell: it has no column {', '.join(missing)}")
    without = rows["status"].isin(STATUSES_WITHOUT_RESULT)
    rows = rows[~without].astype({"n_steps": int, "seed": int})
    return rows.reset_index(drop=True), int(without.sum())


def region(counts: pd.DataFrame, dies: str = "jem", lives: str = "st_jem") -> pd.DataFrame:
    """Settings at which one method lost at least half of its runs and the other none, with the counts of both.

    counts: as of `sweep.counts` by dataset, method, lr, n_steps and step_size.
    """
    keys = ["dataset", "lr", "n_steps", "step_size"]
    both = [counts[counts["method"] == name].set_index(keys)[["alive", "runs"]] for name in (dies, lives)]
    side = both[0].join(both[1], how="inner", lsuffix=f"_{dies}", rsuffix=f"_{lives}")
    dead = 2 * side[f"alive_{dies}"] <= side[f"runs_{dies}"]
    return side[dead & (side[f"alive_{lives}"] == side[f"runs_{lives}"])].reset_index()


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


def verdict(counts: pd.DataFrame, quantity: str, better: str = "low") -> pd.DataFrame:
    """Per data set and method: runs, how many survived, cells that lost at least half, best and worst live cell."""
    rows = []
    for (dataset, method), part in counts.groupby(["dataset", "method"], sort=False):
        alive = part.dropna(subset=[quantity]).sort_values(quantity, ascending=better == "low")
        ends = [_named(alive.iloc[i], quantity) if len(alive) else "none" for i in (0, -1)]
        rows.append({
            "dataset": dataset, "method": method, "runs": part["runs"].sum(), "alive": part["alive"].sum(),
            "cells": len(part), "cells that lost half": int((2 * part["alive"] <= part["runs"]).sum()),
            f"best {quantity}": ends[0], f"worst {quantity}": ends[1],
        })  # fmt: skip
    return pd.DataFrame(rows)


def _named(cell: Mapping[str, Any], quantity: str) -> str:
    setting = ", ".join(f"{key}={cell[key]:g}" for key in ("lr", "n_steps", "step_size"))
    return f"{cell[quantity]:.3g} ({setting})"
