"""Cells of a sweep on dask workers: each a papermill execution in a kernel of its own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tqdm import tqdm

from jemlib.files import ResultsError, read_json, write_atomic
from jemlib.provenance import git_state
from jemlib.study import NOT_STARTED, execute, kernel_environment

if TYPE_CHECKING:
    from distributed import Client

START_ATTEMPTS = 4  # kernels that start at the same moment may pick the same port
_MEMORY_A_CELL = 1.5 * 2**30  # bytes: a kernel with torch, and its worker
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Job(NamedTuple):
    """What a worker needs to know to run a cell. Paths are those of a file system that all workers share."""

    name: str
    root: str  #: the sweep's folder
    notebook: str  #: name of the notebook in it
    cwd: str  #: the kernel's folder
    parameters: dict[str, Any]
    table: str

    @property
    def folder(self) -> Path:
        """The cell's own results folder."""
        return Path(self.root, "cells", self.name)


def run(jobs: Sequence[Job], scheduler: str | None, workers: int) -> None:
    """Run every job and leave a record of each, with a progress bar; what a job raises is recorded, not raised.

    scheduler: address of a running dask scheduler; without it `workers` local processes (0: as many as cores and
    memory allow, and one where there is a GPU). OSError where no scheduler answers.
    """
    if not jobs:
        return
    from distributed import as_completed

    with _client(scheduler, workers or _fitting_workers(len(jobs))) as client:
        n = len(client.scheduler_info(n_workers=-1)["workers"])
        print(f"{len(jobs)} cell{'s' * (len(jobs) != 1)} to run on {n} worker{'s' * (n != 1)}", flush=True)
        # a key of its own for every call: a scheduler that outlives this sweep may remember another of the same name
        futures = {client.submit(run_cell, job, pure=False): job for job in jobs}
        bar = tqdm(total=len(jobs), unit="cell", smoothing=0, mininterval=0.5 if sys.stderr.isatty() else 15)
        with bar:
            for future in as_completed(futures):
                error = future.exception()
                if error is None:
                    record = future.result()
                else:  # not the cell raised but what runs it: its workers died, or the scheduler went away
                    record = _given_up(futures[future], f"{type(error).__name__}: {error}")
                if record["status"] != "done":
                    bar.write(f"{record['cell']} raised: {record['error']}", file=sys.stderr)
                future.release()
                bar.update()


def _given_up(job: Job, error: str) -> dict[str, Any]:
    """The record of a cell whose worker was lost to us, unless it did finish."""
    from filelock import FileLock

    job.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(job.folder / ".lock"):
        path = job.folder / "cell.json"
        return _done(path, job.folder / "tables" / f"{job.table}.csv") or _write_record(job, error, 0.0)


def _done(path: Path, table: Path) -> dict[str, Any] | None:
    """The record of a finished cell; None where it is not finished, its record damaged or its table gone."""
    with contextlib.suppress(FileNotFoundError, ResultsError):
        record = read_json(path)
        return record if record.get("status") == "done" and table.is_file() else None
    return None


@contextlib.contextmanager
def _client(scheduler: str | None, workers: int) -> Iterator[Client]:
    from distributed import Client, LocalCluster

    if scheduler:
        try:
            client = Client(scheduler, timeout=20)
        except (OSError, ValueError) as error:
            raise ConnectionError(f"No dask scheduler answers at {scheduler}.") from error
        with client:
            yield client
        return
    threads = str(max(1, _cores() // workers))
    with _interrupts_held() as release:
        cluster = LocalCluster(
            n_workers=workers, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None,
            memory_limit=0, silence_logs=logging.CRITICAL, env=dict.fromkeys(_THREAD_VARIABLES, threads),
        )  # fmt: skip
        with cluster:
            release()
            with Client(cluster) as client:
                yield client


@contextlib.contextmanager
def _interrupts_held() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back until the call that this yields, and for good in threads and processes that start before.

    A terminal sends it to all of them, and workers that are ended by us need no traceback of their own.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield lambda: None
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # its start would let them through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        yield release
    finally:
        release()


def _cores() -> int:
    from dask.system import CPU_COUNT  # respects affinity and control groups

    return CPU_COUNT


def _fitting_workers(n_jobs: int) -> int:
    """As many as cores and memory allow; one where there is a GPU, which cells would have to share.

    torch asks the driver's library for GPUs (NVML) and does not start CUDA for it, which would take memory here.
    """
    from distributed.system import MEMORY_LIMIT

    if torch.cuda.device_count():
        return 1
    return max(1, min(_cores(), int(MEMORY_LIMIT // _MEMORY_A_CELL), n_jobs))


# --- on a worker --------------------------------------------------------------------------------------------


def run_cell(job: Job) -> dict[str, Any]:
    """Execute a cell's notebook and write its record last; the record. A cell that is done is read."""
    from filelock import FileLock

    if not Path(job.root, "sweep.json").is_file():
        raise FileNotFoundError(
            f"worker on {socket.gethostname()} does not see {job.root}: all workers need the same file system"
        )
    job.folder.mkdir(parents=True, exist_ok=True)
    # a worker that was given up but lives on must not meet the one that took over
    with FileLock(job.folder / ".lock"):
        path, table = job.folder / "cell.json", job.folder / "tables" / f"{job.table}.csv"
        if old := _done(path, table):
            return old
        for stale in (path, table, *job.folder.rglob(".*.tmp")):
            stale.unlink(missing_ok=True)
        started = time.perf_counter()
        error = _execute(job)
        if error is None and not table.is_file():
            error = f"the notebook wrote no table '{job.table}'"
        return _write_record(job, error, time.perf_counter() - started)


def _write_record(job: Job, error: str | None, seconds: float) -> dict[str, Any]:
    record = {
        "cell": job.name, "status": "done" if error is None else "raised", "error": error,
        "parameters": job.parameters, "seconds": round(seconds, 2), "host": socket.gethostname(),
        "threads": int(os.environ.get("OMP_NUM_THREADS") or _cores()), **git_state(),
    }  # fmt: skip
    write_atomic(job.folder / "cell.json", json.dumps(record, indent=2, sort_keys=True).encode())
    return record


def _execute(job: Job) -> str | None:
    """Execute the notebook in a kernel of its own and keep the executed copy; one sentence when it failed."""
    import nbformat
    from jupyter_client import AsyncKernelManager

    from jemlib import kernels

    _prepare_process()
    source = Path(job.root, job.notebook)
    options = {
        "kernel_manager_class": kernels.ForkedKernelManager if kernels.CAN_FORK else AsyncKernelManager,
        "resources": {"metadata": {"path": job.cwd}},  # the kernel's folder; cwd= is the process's
    }
    with tempfile.TemporaryDirectory() as scratch:  # papermill writes its copy cell by cell; only a whole one is kept
        copy = Path(scratch, source.name)
        for attempt in range(1, START_ATTEMPTS + 1):
            error = execute(source, copy, job.parameters | {"results_dir": str(job.folder)}, **options)
            if error is None or not error.startswith(NOT_STARTED) or attempt == START_ATTEMPTS:
                break
            time.sleep(random.uniform(0.5, 2) * attempt)
        if copy.is_file():
            notebook = nbformat.read(copy, as_version=4)
            notebook.metadata.papermill.update(input_path=source.name, output_path=source.name)
            write_atomic(job.folder / source.name, nbformat.writes(notebook).encode())
    return error


@functools.cache
def _prepare_process() -> None:
    """Kernels of this environment, on few threads, as long as this worker lives: its threads share one environment."""
    stack = contextlib.ExitStack()
    stack.enter_context(kernel_environment())
    atexit.register(stack.close)
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, "1")
