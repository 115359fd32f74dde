"""Training runs as artefacts: each has a name, a checkpoint, a record and a row in timing.csv."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from filelock import FileLock

from jemlib import distributed, evaluation
from jemlib.checkpoints import load_checkpoint
from jemlib.config import TrainConfig
from jemlib.data import Dataset, Labelled
from jemlib.energy import JEM
from jemlib.files import ResultsError
from jemlib.provenance import provenance, repo_root
from jemlib.results import Store
from jemlib.training import FitResult, build_model, fit, pick_device


def run_name(dataset: Dataset, config: TrainConfig) -> str:
    """The name of a run: data, method, seed, and the hash of its config and data."""
    return f"{dataset.name}-{config.method}-s{config.seed}-{config.hash(dataset.id)}"


def train(store: Store, dataset: Dataset, config: TrainConfig, **options: Any) -> tuple[str, FitResult]:
    """`training.fit` on a data set's training part, with checkpoint and record in the store.

    Returns (name of the run, result). The name holds the config's hash, so runs of other settings never overwrite
    each other; a finished run is read, not trained again (force=True trains it). options: as of `fit`.
    """
    name = run_name(dataset, config)
    path = store.checkpoint_path(name)
    options |= {"checkpoint": path, "data_id": dataset.id, "label": f"{config.method} seed {config.seed}"}
    result = fit(config, dataset.train, len(dataset.classes), **options)
    try:
        kept = store.read_record(name)
    except ResultsError:
        kept = {}
    world, device = distributed.launched(), next(result.model.parameters()).device
    if world.rank == 0 and (result.trained_now or not kept):
        kept = {
            "run": name,
            "config": config.model_dump(mode="json"),
            "config_hash": config.hash(dataset.id),
            "seed": config.seed,
            "temperature": config.temperature(),
            "data": {"name": dataset.name, "source": dataset.source, "checksum": dataset.checksum},
            "n_train": len(dataset.train.x),
            "input_shape": list(dataset.train.x.shape[1:]),
            "n_classes": len(dataset.classes),
            "parameters": sum(p.numel() for p in result.model.parameters()),
            "status": result.status,
            "diverged_at": result.diverged_at,
            "seconds": result.seconds,
            "ms_per_step": result.ms_per_step,
            "precision": result.precision,
            "processes": world.size,
            "history": result.history,
            **provenance(device),
        }
        row = {"what": name, "seconds": round(result.seconds, 3), "ms_per_step": round(result.ms_per_step, 3)}
        row |= {"peak_memory_mb": peak_memory_mb(device), "device": kept["device"], "threads": kept["threads"]}
        store.timing(row | {"precision": kept["precision"]})
        store.record(name, kept)  # last: a run that is killed before has no record, and all of this is written again
    store.uses([name])
    world.barrier()  # the record is there for all
    return name, result


def load_model(store: Store, name: str) -> JEM:
    """The model of a run, from its record and checkpoint, in eval mode; ResultsError where one is missing.

    Of a diverged run these are the weights of its last good checkpoint.
    """
    record, path = store.read_record(name), store.checkpoint_path(name)
    if not path.is_file():
        raise ResultsError(f"{path} is missing: run the notebook that trains it first.")
    if "input_shape" not in record:
        raise ResultsError(f"the record of {name} is of an earlier version: train it again.")
    model = build_model(TrainConfig(**record["config"]), tuple(record["input_shape"]), record["n_classes"])
    model.load_state_dict(load_checkpoint(path, mmap=True)["model"])
    return model.eval().to(pick_device("auto"))


def add_metrics(store: Store, name: str, metrics: dict[str, Any]) -> None:
    """Add evaluation results to a run's record; keys given before are replaced."""
    with FileLock(store.dir / ".runs.lock"):  # two notebooks may add to one record
        record = store.read_record(name)
        store.record(name, record | {"metrics": record.get("metrics", {}) | metrics})


def method_table(
    store: Store, dataset: Dataset, trained: Sequence[tuple[str, FitResult]], judge: JEM, **options: int
) -> tuple[pd.DataFrame, dict[str, Labelled]]:
    """The table of a methods' notebook: one row a run, on test data, each row added to the run's record.

    trained: pairs as `train` returns them; options: as of `evaluation.assess`. judge_accuracy is on validation data.
    Returns (table, method -> fresh samples of its first seed).
    """
    reference = evaluation.features(judge, dataset.test.x)
    sizes = {
        "n_test": len(dataset.test.x),
        "judge_accuracy": evaluation.classification(judge, dataset.val)["accuracy"],
    }
    rows, fresh = [], {}
    for name, result in trained:
        row, samples = evaluation.assess(result, dataset.test, judge, reference, **options)
        add_metrics(store, name, row)
        about = {"data_source": dataset.source, "network": result.config.network_name()}
        rows.append(about | row | sizes | {"run": name})
        if samples is not None:
            fresh.setdefault(result.config.method, samples)
    return pd.DataFrame(rows), fresh


def sampler_grid(
    store: Store, trained: Sequence[tuple[str, FitResult]], val: Labelled, judge: JEM, **options: int
) -> pd.DataFrame:
    """The grid that chooses a method's sampler: one row a run, judged on validation data alone.

    trained: (name, result) pairs as `train` returns them; options: as of `evaluation.assess`. Each row joins the
    run's record as `validation`. `chosen` marks, per method, the run with the smallest Frechet distance of those that
    survived; where none did, the one that lasted longest.
    """
    reference = evaluation.features(judge, val.x)
    rows = []
    for name, result in trained:
        row, _ = evaluation.assess(result, val, judge, reference, **options)
        add_metrics(store, name, {"validation": row})
        sampler = {"step_size": result.config.step_size, "max_rms_step": result.config.max_rms_step}
        rows.append(row | sampler | {"diverged_at": result.diverged_at, "run": name})
    grid = pd.DataFrame(rows)
    order = grid.assign(end=-grid["diverged_at"].fillna(math.inf)).sort_values(["end", "frechet"], kind="stable")
    grid["chosen"] = grid.index.isin(order.groupby("method").head(1).index)
    columns = ["method", "step_size", "max_rms_step", "chosen", "accuracy", "nll", "energy_gap", "class_agreement"]
    return grid[[*columns, "frechet", "n_frechet", "steps", "seed", "status", "run"]]


def with_chosen(configs: Sequence[TrainConfig], grid: pd.DataFrame) -> list[TrainConfig]:
    """The configs with the step size and bound that a `sampler_grid` chose for their methods."""
    chosen = grid[grid["chosen"]].set_index("method")
    found = []
    for config in configs:
        if config.method in chosen.index:
            row = chosen.loc[config.method]
            bound = None if pd.isna(row["max_rms_step"]) else row["max_rms_step"]
            config = config.replace(step_size=row["step_size"], max_rms_step=bound)
        found.append(config)
    return found


def beside_published(results: pd.DataFrame) -> pd.DataFrame:
    """Our rows (of `method_table`) above other systems' numbers: dataset, model, metric, value, source, note.

    Ours say network, budget, data and status. A number that was not obtained says "not available".
    """
    published = pd.read_csv(repo_root() / "notebooks" / "published_numbers.csv")
    published["value"] = published["value"].astype(object).where(published["value"].notna(), "not available")
    rows = []
    for row in results.to_dict("records"):
        end = row["status"].split()[0]
        about = f"{row['steps']} iterations, {end}; not comparable with the networks and budgets below"
        rows.append({
            "dataset": row["data_source"], "model": f"{row['network']} {row['method']}, seed {row['seed']}",
            "metric": "accuracy", "value": round(100 * row["accuracy"], 2), "source": "this run", "note": about,
        })  # fmt: skip
    return pd.concat([pd.DataFrame(rows).astype(object), published.fillna("")], ignore_index=True)


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory so far, MiB: of the GPU where the device is one, else the resident set of this process."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB elsewhere
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)
