"""Several training runs at once, each on threads of its own.

Small networks gain little from a second thread and much from a second run beside them. The number of threads of a
run is fixed whatever the machine, since results depend on it in their last digits; the number of workers is not.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import joblib
import torch
from tqdm import tqdm

from jemlib import distributed, runs
from jemlib.config import TrainConfig
from jemlib.data import Dataset, Labelled
from jemlib.progress import a_person_watches
from jemlib.results import Store
from jemlib.training import FitResult, pick_device


class Task(NamedTuple):
    """One run: a data set, a config, and further options of `training.fit`."""

    dataset: Dataset
    config: TrainConfig
    options: dict[str, Any] = {}  # noqa: RUF012  never written to


def train_all(
    store: Store, tasks: Sequence[Task], *, workers: int = 0, threads: int = 1, force: bool = False
) -> list[tuple[str, FitResult]]:
    """`runs.train` for every task, `workers` at a time; (name, result) in the order of the tasks.

    workers: 0 takes one a core, and one alone for runs on a GPU; 1 trains here, with live progress. Under torchrun
    its processes train every run together, one run after the other. threads: CPU threads of each run. Runs that are
    finished are read, unless force. An error in a run is raised here, after which the others' checkpoints are there to
    go on from.
    """
    named = {runs.run_name(task.dataset, task.config): task for task in tasks}  # two equal tasks are one run
    missing = [task for name, task in named.items() if force or not store.has_record(name)]
    if distributed.launched().size > 1:
        workers = 1
    on_gpu = any(pick_device(task.config.device).type == "cuda" for task in missing)
    workers = min(workers or (1 if on_gpu else os.cpu_count() or 1), len(missing))
    if workers > 1:
        # largest first would finish sooner; the given order keeps the progress readable
        jobs = (joblib.delayed(_train)(store, _stripped(task), threads, force) for task in missing)
        pool = joblib.Parallel(n_jobs=workers, mmap_mode="c", return_as="generator_unordered", pre_dispatch=workers)
        for _ in tqdm(pool(jobs), total=len(missing), desc="runs", disable=not a_person_watches()):
            pass
        force = False
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return [runs.train(store, task.dataset, task.config, force=force, **task.options) for task in tasks]
    finally:
        torch.set_num_threads(before)


def _stripped(task: Task) -> tuple[Dataset, Any, Any, TrainConfig, dict[str, Any]]:
    """A task for another process: the training part alone, as arrays, which joblib maps instead of copying."""
    x, y = (part.numpy() for part in task.dataset.train)
    nothing = Labelled(task.dataset.train.x[:0], task.dataset.train.y[:0])
    bare = dataclasses.replace(task.dataset, train=nothing, val=nothing, test=nothing)
    return bare, x, y, task.config, task.options


def _train(store: Store, stripped: tuple, threads: int, force: bool) -> None:
    """One run in a worker; its result is the checkpoint and the record."""
    _end_with_parent()
    torch.set_num_threads(threads)
    os.environ["JEMLIB_PROGRESS"] = "none"
    bare, x, y, config, options = stripped
    dataset = dataclasses.replace(bare, train=Labelled(torch.from_numpy(x), torch.from_numpy(y)))
    runs.train(store, dataset, config, force=force, **options)


def _end_with_parent() -> None:
    """Let no worker go on training for a kernel that was killed."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    if not any(thread.name == "end-with-parent" for thread in threading.enumerate()):
        threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
