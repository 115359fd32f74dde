"""What is saved by named options, and what it costs: fewer SGLD steps, informative starts, sampling in bfloat16.

Each variant trains the same network on MNIST as one run of ST-JEM does, one option changed.

"half the steps, twice as long" also stands for freezing all but the first layer during every second step (YOPO, as
JEM++ uses it). The first layer of both image networks is linear, so while the gradient at its output is frozen, that
at its input is too: two such steps are one of twice the step size, whose noise has twice the variance.
"""

from __future__ import annotations

import math

import pandas as pd

from jemlib import evaluation
from jemlib.config import TrainConfig
from jemlib.data import Dataset
from jemlib.parallel import Task, train_all
from jemlib.results import Store

#: variant -> what it overrides
VARIANTS: dict[str, dict[str, object]] = {
    "as in notebook 02": {"precision": "float32"},
    "half the steps": {"precision": "float32", "n_steps": 5},
    "two steps": {"precision": "float32", "n_steps": 2},
    "half the steps, twice as long": {
        "precision": "float32", "n_steps": 5, "step_size": 20.0, "noise_std": 0.01 * math.sqrt(2),
    },
    "informative start": {"precision": "float32", "chain_start": "class_gaussians"},
    "informative start, half the steps": {"precision": "float32", "chain_start": "class_gaussians", "n_steps": 5},
    "informative start, two steps": {"precision": "float32", "chain_start": "class_gaussians", "n_steps": 2},
    "bfloat16": {"precision": "bfloat16"},
}  # fmt: skip


def compare(
    store: Store, digits: Dataset, *, n_iterations: int = 300, n_seeds: int = 3, n_fresh: int = 300, workers: int = 0
) -> pd.DataFrame:
    """Train every variant with every seed; a row each, on test data, also written to tables/benchmark_savings.csv.

    `frechet` is of fresh chains of 100 steps from uniform noise, `frechet_buffer` of the chains of training.
    """
    shared = {"network": "conv_net", "width": 16, "n_iterations": n_iterations, "warmup": 50, "buffer_size": 5000}
    shared |= {"decay_at": (3 * n_iterations // 4,), "input_noise": 0.03}
    judge = TrainConfig(method="softmax", features=64, beta1=0.9, seed=1000, **shared)
    ((_, judged),) = train_all(store, [Task(digits, judge)], workers=1)
    reference = evaluation.features(judged.model, digits.test.x)
    sampler = {"n_steps": 10, "step_size": 10.0, "noise_std": 0.01}
    cells = [
        (name, TrainConfig(method="st_jem", seed=seed, **(shared | sampler | changes)))
        for name, changes in VARIANTS.items()
        for seed in range(n_seeds)
    ]
    trained = train_all(store, [Task(digits, config) for _, config in cells], workers=workers)
    rows = []
    for (name, config), (run, result) in zip(cells, trained, strict=True):
        options = {"n_fresh": n_fresh, "fresh_steps": 100, "seed": config.seed}
        # judged by float32 chains, so that training alone differs
        result.config = config.replace(precision="float32")
        row, _ = evaluation.assess(result, digits.test, judged.model, reference, **options)
        kept = ("accuracy", "nll", "energy_data", "energy_gap", "class_agreement", "frechet", "frechet_buffer")
        change = {"n_steps": config.n_steps, "chain_start": config.chain_start, "precision": config.precision}
        rows.append(
            {"variant": name, **change, "seed": config.seed}
            | {key: row[key] for key in kept}
            | {"status": row["status"], "run": run}
        )
    return store.table("benchmark_savings", pd.DataFrame(rows))
