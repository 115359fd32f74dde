"""Training runs on the toy distributions, scored exactly on a grid: KL, mutual information, distance to the optimum."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from jemlib import exact, runs
from jemlib.config import TrainConfig
from jemlib.data import Dataset, Labelled
from jemlib.energy import JEM
from jemlib.exact import Space
from jemlib.parallel import Task, train_all
from jemlib.results import Store
from jemlib.toy import Toy
from jemlib.training import FitResult

ORACLE = "oracle"  #: weights without an anchor over every point of a grid: log Z is exact
_ORACLE_METHOD = "st_jem_none"


class Reference(NamedTuple):
    """What a run is scored against: the data's density, and the density that its method should come to rest at."""

    space: Space
    log_data: Tensor  #: (S, K)
    log_optimum: Tensor | None  #: (S, K), None where there is no stationary point
    free_labels: bool = False  #: whether the method leaves p(y) free, so that only p(x given y) has an optimum

    def score(self, model: JEM) -> dict[str, float]:
        """Exact figures of a model, in nats.

        kl_nats: KL(p_data(x, y) || p(x, y)); kl_given_label_nats: mean over labels of KL(p_data(x given y) ||
        p(x given y)); kl_to_optimum: KL(p_opt || p) of the joint densities, with the data's p(y) in both where the
        method leaves it free, and nan where there is no optimum; mi_nats: I(X; Y) of the model.
        """
        mass = self.space.log_mass
        logits = _logits(model, self.space)
        log_p = exact.log_joint(logits, mass)
        given_label = exact.log_conditional(logits, mass) + exact.log_labels(self.log_data, mass)
        optimum = math.nan
        if self.log_optimum is not None:
            optimum = float(exact.kl(self.log_optimum, given_label if self.free_labels else log_p, mass))
        return {
            "kl_nats": float(exact.kl(self.log_data, log_p, mass)),
            "kl_given_label_nats": float(exact.kl(self.log_data, given_label, mass)),
            "kl_to_optimum": optimum,
            "mi_nats": float(exact.mutual_information(logits, mass)["posterior"]),
        }


class ToyRun(NamedTuple):
    """One finished run and its scores at the end."""

    dataset: str
    method: str
    seed: int
    result: FitResult
    reference: Reference
    scores: dict[str, float]
    run: str  #: its record

    def row(self) -> dict[str, Any]:
        """Its row in a table of methods."""
        first = {"dataset": self.dataset, "method": self.method, "seed": self.seed}
        return first | self.scores | {"status": self.result.status, "run": self.run}

    def density(self) -> Tensor:
        """The model's p(x) on the reference's grid, (S,)."""
        logits = _logits(self.result.model, self.reference.space)
        return exact.log_marginal(logits, self.reference.space.log_mass).exp()


def _logits(model: JEM, space: Space) -> Tensor:
    """The model's logits on the grid, (S, K), double and on the CPU, wherever the model is."""
    device = next((p.device for p in model.parameters()), None)
    with torch.no_grad():
        return model.logits(space.points.float().to(device)).cpu().double()


def dataset(name: str, n: int, seed: int) -> Dataset:
    """n training points of a toy distribution, float32, with as many again for validation and test together."""
    toy = Toy(name)
    generator = torch.Generator().manual_seed(seed)
    train, val, test = (Labelled(x.float(), y) for x, y in (toy.sample(m, generator) for m in (n, n // 2, n - n // 2)))
    classes = tuple(str(k) for k in range(toy.n_classes))
    return Dataset(name, "closed form", f"{toy.shape} seed {seed}", classes, train, val, test)


def reference(name: str, method: str, config: TrainConfig, n: int) -> Reference:
    """The exact densities of a distribution on an n x n grid and the optimum predicted for a method and its sampler.

    Without a step (config.n_steps = 0) chains stay where they start: the prediction is that for uniform samples.
    """
    space = Space.grid(n)
    log_data = exact.log_joint(Toy(name).log_joint(space.points), space.log_mass)
    if method == ORACLE:
        return Reference(space, log_data, log_data)
    sampler = "perfect" if config.n_steps else "uniform"
    objective = config.objective()
    free_labels = objective.classify == 0 and objective.conditional
    if objective.mi_weight or objective.energy_l2:
        return Reference(space, log_data, None, free_labels)  # further terms move the optimum
    if objective.generative == "x|y" and 0 < objective.exponent < 1:
        return Reference(space, log_data, None, free_labels)  # tempered weights: no closed form for several labels
    return Reference(space, log_data, exact.predicted(objective, log_data, space.log_mass, sampler), free_labels)


def sweep(
    store: Store,
    datasets: Iterable[Dataset],
    methods: Iterable[str],
    seeds: Iterable[int],
    config: dict[str, Any],
    *,
    grid: int,
    oracle_grid: int,
    **options: Any,
) -> list[ToyRun]:
    """Train every method on every data set with every seed, all with the same settings, or read finished runs.

    config: of `TrainConfig`, method and seed aside; grid, oracle_grid: cells a side for scores and for the oracle's
    log Z; options: as of `parallel.train_all`.
    """
    tasks, scored = [], []
    for data, method, seed in ((data, method, seed) for data in datasets for method in methods for seed in seeds):
        oracle = method == ORACLE
        settings = TrainConfig(method=_ORACLE_METHOD if oracle else method, **(config | {"seed": seed}))
        scored.append((data.name, method, reference(data.name, method, settings, grid)))
        extra: dict[str, Any] = {"evaluate": scored[-1][-1].score, "lines": 1}
        if oracle:
            extra["proposals"] = Space.grid(oracle_grid).points.float()
            data = dataclasses.replace(
                data, name=f"{data.name}-{ORACLE}{oracle_grid}"
            )  # another run than its method's own
        tasks.append(Task(data, settings, extra))
    found = []
    for (dataset, method, exact_for), (name, result) in zip(scored, train_all(store, tasks, **options), strict=True):
        scores = exact_for.score(result.model)
        runs.add_metrics(store, name, scores)
        found.append(ToyRun(dataset, method, result.config.seed, result, exact_for, scores, name))
    return found


def table(found: Iterable[ToyRun]) -> pd.DataFrame:
    """A row per run: dataset, method, seed, the scores of `Reference.score`, status."""
    return pd.DataFrame([run.row() for run in found])


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Per data set and method: medians over seeds, the worst kl_to_optimum, and how many runs ended "ok"."""
    groups = rows.groupby(["dataset", "method"], sort=False)
    return groups.agg(
        kl_nats=("kl_nats", "median"),
        kl_given_label_nats=("kl_given_label_nats", "median"),
        kl_to_optimum=("kl_to_optimum", "median"),
        worst_kl_to_optimum=("kl_to_optimum", "max"),
        mi_nats=("mi_nats", "median"),
        runs_ok=("status", lambda status: int((status == "ok").sum())),
        runs=("status", "size"),
    ).reset_index()


def histories(found: Iterable[ToyRun]) -> pd.DataFrame:
    """Every monitor of every run in long form: dataset, method, seed, step, and what `fit` logged."""
    first = (
        {"dataset": run.dataset, "method": run.method, "seed": run.seed} | h
        for run in found
        for h in run.result.history
    )
    return pd.DataFrame(list(first))
