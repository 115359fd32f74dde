"""A user's own script: data, a config, `runs.train`, a table. Arguments: results folder, settings as JSON.

Settings: data ("rings", "images"), n, fault (what to do to the data), and whatever `TrainConfig` takes.
"""

import json
import sys

import pandas as pd
import torch

from jemlib import runs, toy_runs
from jemlib.config import TrainConfig
from jemlib.data import Dataset, Labelled
from jemlib.results import Store

SMALL = {
    "network": "mlp", "width": 16, "n_iterations": 60, "batch_size": 16, "n_steps": 3, "step_size": 0.003,
    "buffer_size": 64, "input_noise": 0.01, "log_every": 5, "checkpoint_every": 10, "device": "cpu",
}  # fmt: skip


def images(n: int, fault: str) -> Dataset:
    """Grey images (n, 1, 16, 16) of three classes: dark, medium, bright."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % (2 if fault == "absent class" else 3)
    x = (0.6 * (y - 1)[:, None, None, None] + 0.2 * torch.randn(n, 1, 16, 16, generator=generator)).clamp(-1, 1)
    if fault == "nan":
        x[n // 2, 0, 3, 3] = float("nan")
    part = Labelled(x, y)
    return Dataset("squares", "made here", fault or "whole", ("dark", "medium", "bright"), part, part, part)


def main(folder: str, text: str) -> None:
    settings = json.loads(text)
    torch.set_num_threads(settings.pop("threads", 1))
    data, n, fault = settings.pop("data", "rings"), settings.pop("n", 200), settings.pop("fault", "")
    force = settings.pop("force", False)
    dataset = toy_runs.dataset("rings", n, 0) if data == "rings" else images(n, fault)
    config = TrainConfig(**(SMALL | settings))
    store = Store(folder, "01_faults")
    score = toy_runs.reference("rings", config.method, config, 16).score if data == "rings" else None
    name, result = runs.train(store, dataset, config, force=force, evaluate=score)
    if score:
        runs.add_metrics(store, name, score(result.model))
    row = {"method": config.method, "status": result.status, "diverged_at": result.diverged_at}
    store.table("methods", pd.DataFrame([row | result.history[-1]]))
    print(name, result.status)


if __name__ == "__main__":
    main(*sys.argv[1:])
