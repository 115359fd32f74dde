"""The ablation of the anchor: what stands in the denominator, crossed with a sampler made worse step by step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from jemlib import evaluation, runs, toy_runs
from jemlib.config import TrainConfig
from jemlib.data import Dataset
from jemlib.energy import JEM
from jemlib.parallel import Task, train_all
from jemlib.results import Store
from jemlib.training import FitResult

#: arm -> what it overrides; terms, chains and everything else are the same for all
ARMS: dict[str, dict[str, Any]] = {
    "plain": {"method": "st_jem_plain"},  # Equation (17): the average over samples
    "none": {"method": "st_jem_none"},  # Equation (19): weights, samples alone
    "own": {"method": "st_jem_own"},  # with the datum itself
    "tempered": {"method": "st_jem", "exponent": 0.5},  # the whole batch, weights tempered half-way to the average
    "batch": {"method": "st_jem"},  # Equation (20) with the whole mini-batch
}

#: what the whole batch could be best at: the best of a quantity, and how it is called
_WHOLE_BATCH = {
    "kl_nats": ("min", "the smallest KL to the data"),
    "accuracy": ("max", "the highest accuracy"),
    "frechet": ("min", "the smallest Frechet distance of fresh chains"),
}


def arms(text: str) -> list[str]:
    """Names of a comma-separated list; ValueError for one that is no arm."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in ARMS:
            raise ValueError(f"no arm is called {name!r}; there are {', '.join(ARMS)}")
    return names


def settings(text: str) -> dict[str, dict[str, str]]:
    """Sampler settings "n_steps=1; n_steps=10, lr=0.01": text of one -> what it overrides in the base configuration.

    Values stay text; `TrainConfig` types and checks them. "base" overrides nothing.
    """
    found = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        pairs = [] if part == "base" else [item.split("=") for item in part.split(",")]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"a setting reads name=value, not {part!r}")
        found[part] = {name.strip(): value.strip() for name, value in pairs}
    return found


def configs(
    base: dict[str, Any], arm_names: Iterable[str], chosen: dict[str, dict[str, str]], seeds: Iterable[int]
) -> list[tuple[str, str, TrainConfig]]:
    """Every cell as (arm, setting, config), each checked, before any of them is trained."""
    cells = [(arm, text, seed) for text in chosen for arm in arm_names for seed in seeds]
    return [(arm, text, TrainConfig(**(base | chosen[text] | ARMS[arm] | {"seed": seed}))) for arm, text, seed in cells]


def _row(arm: str, setting: str, dataset: Dataset, name: str, result: FitResult) -> dict[str, Any]:
    config, last = result.config, result.history[-1]
    first = {"dataset": dataset.name, "data_source": dataset.source, "arm": arm, "setting": setting}
    sampler = {key: getattr(config, key) for key in ("n_steps", "step_size", "reinit_prob", "lr", "seed")}
    monitors = {key: last.get(key, math.nan) for key in ("energy_gap", "gradient_norm", "effective_samples")}
    end = {"status": result.status, "diverged_at": result.diverged_at, "n_iterations": config.n_iterations, "run": name}
    return first | sampler | evaluation.classification(result.model, dataset.test) | monitors | end


def toy(
    store: Store, data: Dataset, cells: Sequence[tuple[str, str, TrainConfig]], grid: int, **options: Any
) -> pd.DataFrame:
    """Train every cell on a toy distribution; one row a run, with exact KL(p_data || p) in nats.

    options: as of `parallel.train_all`.
    """
    scored = [toy_runs.reference(data.name, config.method, config, grid) for _, _, config in cells]
    tasks = [
        Task(data, config, {"evaluate": reference.score, "lines": 1})
        for (_, _, config), reference in zip(cells, scored, strict=True)
    ]
    rows = []
    trained = train_all(store, tasks, **options)
    for (arm, setting, _), reference, (name, result) in zip(cells, scored, trained, strict=True):
        scores = {"kl_nats": reference.score(result.model)["kl_nats"]}
        runs.add_metrics(store, name, scores)
        rows.append(_row(arm, setting, data, name, result) | scores)
    return pd.DataFrame(rows)


def images(
    store: Store,
    data: Dataset,
    cells: Sequence[tuple[str, str, TrainConfig]],
    judge: JEM,
    assessment: dict[str, int],
    **options: Any,
) -> pd.DataFrame:
    """Train every cell on images; one row a run, fresh chains seen by the judge.

    assessment: options of `evaluation.assess`; options: as of `parallel.train_all`.
    """
    reference = evaluation.features(judge, data.test.x)
    trained = train_all(store, [Task(data, config, {"lines": 1}) for _, _, config in cells], **options)
    rows = []
    for (arm, setting, _), (name, result) in zip(cells, trained, strict=True):
        seen, _ = evaluation.assess(result, data.test, judge, reference, **assessment)
        seen = {key: seen[key] for key in ("class_agreement", "frechet", "n_frechet")}
        runs.add_metrics(store, name, seen)
        rows.append(_row(arm, setting, data, name, result) | seen)
    return pd.DataFrame(rows)


def survival(rows: pd.DataFrame) -> pd.DataFrame:
    """Share of runs still alive by iteration, as steps of a curve: dataset, arm, step, alive, n."""
    found = []
    for (dataset, arm), part in rows.groupby(["dataset", "arm"], sort=False):
        ends = np.sort(part["diverged_at"].dropna().to_numpy())
        steps = [0, *ends, part["n_iterations"].max()]
        alive = [1.0, *(1 - (i + 1) / len(part) for i in range(len(ends))), 1 - len(ends) / len(part)]
        found += [
            {"dataset": dataset, "arm": arm, "step": step, "alive": share, "n": len(part)}
            for step, share in zip(steps, alive, strict=True)
        ]
    return pd.DataFrame(found)


def summary(rows: pd.DataFrame, quantities: Sequence[str]) -> pd.DataFrame:
    """Per data set, setting and arm: mean and standard deviation over the runs that survived, and how many did.

    A diverged run's numbers are no estimate of what the arm reaches, so they stay out of the mean; they are counted.
    Quantities that no row has, as class agreement without images, are left out.
    """
    quantities = [name for name in quantities if name in rows]
    found = []
    for keys, part in rows.groupby(["dataset", "setting", "arm"], sort=False):
        alive = part[part["status"] == "ok"]
        cell = dict(zip(("dataset", "setting", "arm"), keys, strict=True))
        for name in quantities:
            cell |= {f"{name}_mean": alive[name].mean(), f"{name}_std": alive[name].std()}
        found.append(cell | {"alive": len(alive), "seeds": len(part)})
    return pd.DataFrame(found)


def verdict(rows: pd.DataFrame) -> pd.DataFrame:
    """Per data set and arm: runs, how many diverged and in which settings, and its best and worst surviving setting.

    Judged by kl_nats where it is known, else by accuracy.
    """
    found = []
    for (dataset, arm), part in rows.groupby(["dataset", "arm"], sort=False):
        dead, alive = part[part["status"] != "ok"], part[part["status"] == "ok"]
        exact = "kl_nats" in part and part["kl_nats"].notna().any()
        quantity = "kl_nats" if exact else "accuracy"
        means = alive.groupby("setting")[quantity].mean().astype(float).sort_values(ascending=exact)
        found.append({
            "dataset": dataset, "arm": arm, "runs": len(part), "diverged": len(dead),
            "diverged in": "; ".join(dict.fromkeys(dead["setting"])) or "none", "judged by": quantity,
            "best": f"{means.iloc[0]:.3g} ({means.index[0]})" if len(means) else "none",
            "worst": f"{means.iloc[-1]:.3g} ({means.index[-1]})" if len(means) else "none",
        })  # fmt: skip
    return pd.DataFrame(found)


def claims(rows: pd.DataFrame) -> pd.DataFrame:
    """What is said of the anchor, held against these runs: claim, whether it holds in all settings, and the figures.

    Means over the runs that survived; where only one of the arms that a claim compares was run, it is left out.
    """
    found = []
    dead = (rows["status"] != "ok").groupby(rows["arm"], sort=False).agg(["sum", "size"])
    lost = {arm: f"{part['sum']} of {part['size']} runs lost" for arm, part in dead.iterrows()}
    for arm, claim in {
        "plain": "plain averages lose runs",
        "none": "weights lose none, without any anchor",
        "batch": "weights over the whole batch lose none",
    }.items():
        if arm in lost:
            found.append((claim, bool(dead.loc[arm, "sum"]) == (arm == "plain"), lost[arm]))
    for dataset, part in rows[rows["status"] == "ok"].groupby("dataset", sort=False):
        for quantity, (best, claim) in _WHOLE_BATCH.items():
            exact = "kl_nats" in part and part["kl_nats"].notna().any()  # then accuracy has little to say
            if quantity not in part or part[quantity].isna().all() or (exact and quantity == "accuracy"):
                continue
            means = part.pivot_table(quantity, "setting", "arm", sort=False)
            means = means[[arm for arm in means if arm != "plain"]]
            if "batch" not in means or len(means.columns) < 2:
                continue
            first = means.agg(best, axis=1) == means["batch"]
            said = ", ".join(f"{arm} {value:.3g}" for arm, value in means.iloc[0].items())
            figures = f"in {first.sum()} of {len(first)} settings; {means.index[0]}: {said}"
            found.append((f"{dataset}: of all weights, those over the whole batch have {claim}", first.all(), figures))
    return pd.DataFrame(found, columns=["claim", "holds", "figures"])
