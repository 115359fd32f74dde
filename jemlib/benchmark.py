"""How fast an SGLD step and a training iteration are, against JEM written the usual way, in one run.

The two take turns, and ratios are medians over pairs: what else the machine does meets both. The plain iteration is
that of tests/benchmarks/plain_jem.py, in float32 whatever the precision of ours.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch.utils.flop_counter import FlopCounterMode

from jemlib import objectives, precision, step_profile
from jemlib.config import TrainConfig
from jemlib.data import Labelled
from jemlib.provenance import provenance, repo_root
from jemlib.results import Store
from jemlib.sampler import frozen
from jemlib.training import _Run, pick_device


class Case(NamedTuple):
    """A network, and the size of an iteration that a CPU can bear."""

    network: dict[str, Any]  #: of `TrainConfig`
    shape: tuple[int, ...]
    batch: int = 64
    n_steps: int = 20
    repeats: int = 7


def _wide(depth: int, width: int) -> dict[str, Any]:
    return {"network": "wide_resnet", "depth": depth, "width": width}


CASES = {
    "toy MLP": Case({"network": "mlp", "width": 128, "input_scale": 5.0}, (2,), batch=256, repeats=25),
    "MNIST net": Case({"network": "conv_net", "width": 16}, (1, 28, 28), repeats=15),
    "WRN-10-2": Case(_wide(10, 2), (3, 32, 32), repeats=5),
    "WRN-16-2": Case(_wide(16, 2), (3, 32, 32), repeats=5),
    "WRN-28-10": Case(_wide(28, 10), (3, 32, 32), batch=4, n_steps=2, repeats=3),
}
_COLUMNS = [
    *("network", "what", "batch", "n_steps", "precision", "threads", "plain_ms", "ours_ms", "ratio"),
    *("images_steps_per_s", "gflops", "peak_gflops", "share_of_peak"),
    *("plain_peak_mb", "ours_peak_mb", "memory_ratio", "device", "gpu", "torch", "commit"),
]
_ON_GPU = {"batch": 64, "n_steps": 20, "repeats": 10}  # for every case
_GROWTH = {"batch": (16, 32, 64, 128), "n_steps": (5, 10, 20, 40), "width": (8, 16, 32, 64)}  # of the MNIST net


def plain_jem() -> ModuleType:
    """The module of the plain iteration, which lies beside the tests."""
    name = "jemlib_plain_jem"
    if name not in sys.modules:
        path = repo_root() / "tests" / "benchmarks" / "plain_jem.py"
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


class Iteration:
    """Our training iteration and the plain one on the same network, data and settings; the method is JEM."""

    def __init__(
        self, case: Case, *, batch: int, n_steps: int, precision: str, device: torch.device, noise_std: float = 0.01
    ):
        config = TrainConfig(
            method="jem", n_iterations=1, batch_size=batch, n_steps=n_steps, step_size=2.0, noise_std=noise_std,
            lr=1e-4, buffer_size=1000, energy_limit=1e30, precision=precision, device=str(device), **case.network,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        x = torch.empty(4 * batch, *case.shape).uniform_(-1, 1, generator=generator)
        self.run = _Run(config, Labelled(x, torch.arange(len(x)) % 10), 10, "", None)
        self.x, self.y = (part[:batch] for part in self.run.train)
        plain = plain_jem()
        network = plain.usual_layers(self.run.model)
        self.plain = plain.PlainJEM(network, self.run.buffer.x.cpu().clone(), n_steps, noise_std=noise_std)
        self.device = self.run.device

    def plain_steps(self) -> None:
        x = self.x
        for _ in range(self.plain.n_steps):
            x = plain_jem().langevin_step(self.plain.model, x, self.plain.step_size, self.plain.noise_std)

    def flops(self) -> tuple[float, float]:
        """Floating-point operations of an SGLD step, and of an iteration, by the network's shapes."""
        model, method = self.run.model, self.run.method
        with frozen(model), FlopCounterMode(display=False) as step:
            model.energy(self.x.clone().requires_grad_()).sum().backward()
        with FlopCounterMode(display=False) as update:
            f_pos, f_neg = model.logits(torch.cat([self.x, self.x])).chunk(2)
            objectives.loss(method, f_pos, self.y, f_neg)[0].backward()
        model.zero_grad()
        return step.get_total_flops(), self.plain.n_steps * step.get_total_flops() + update.get_total_flops()


def _seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Wall time of a call; on one CPU thread the process's own time, which leaves out what others do meanwhile."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = clock()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - started


def matmul_peak(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the best of a few matrix products: one square, and two shaped like a convolution's."""
    best = 0.0
    sizes = ((8192,) * 3,) if device.type == "cuda" else ((1024,) * 3, (16384, 288, 64), (4096, 576, 128))
    for m, k, n in sizes:
        a, b = (torch.ones(shape, dtype=dtype, device=device) for shape in ((m, k), (k, n)))
        best = max(best, *(2 * m * k * n / _seconds(lambda a=a, b=b: a @ b, device) for _ in range(3)))
    return best


def compare(name: str, case: Case, what: str, wanted: str, device: torch.device) -> dict[str, Any]:
    """One row: the SGLD step ("sgld step") or the iteration ("iteration") of ours against the plain one.

    Times are medians in ms (on one CPU thread CPU time, else wall time); images_steps_per_s counts an image moved by
    one SGLD step. share_of_peak: of the FLOP/s of this machine's matrix product in that precision, measured in each
    pair.
    """
    steps = case.n_steps if what == "iteration" else min(case.n_steps, 4)
    iteration = Iteration(case, batch=case.batch, n_steps=steps, precision=wanted, device=device)
    run, dtype = iteration.run, iteration.run.dtype
    if what == "iteration":
        ours, plain = run.iterate, lambda: iteration.plain.iterate(iteration.x, iteration.y)
    else:
        ours, plain = lambda: run.move(iteration.x, None), iteration.plain_steps
    calls = 1 if what == "iteration" else steps
    flops = iteration.flops()[what == "iteration"] * (1 if what == "iteration" else steps)
    ours(), plain()  # libraries choose kernels, graphs are captured
    rows = []
    for i in range(case.repeats):
        order = (plain, ours) if i % 2 else (ours, plain)  # neither always comes first
        seconds = {function: _seconds(function, run.device) for function in order}
        rows.append([seconds[plain], seconds[ours], matmul_peak(dtype, run.device)])
    median = [statistics.median(column) for column in zip(*rows, strict=True)]
    return {
        "network": name, "what": what, "batch": case.batch, "n_steps": steps,
        "precision": str(dtype).removeprefix("torch."), "threads": torch.get_num_threads(),
        "plain_ms": 1e3 * median[0] / calls, "ours_ms": 1e3 * median[1] / calls,
        "ratio": statistics.median(plain / ours for plain, ours, _ in rows),
        "images_steps_per_s": statistics.median(case.batch * steps / ours for _, ours, _ in rows),
        "gflops": statistics.median(flops / ours / 1e9 for _, ours, _ in rows), "peak_gflops": median[2] / 1e9,
        "share_of_peak": statistics.median(flops / ours / peak for _, ours, peak in rows),
    }  # fmt: skip


# --- memory -------------------------------------------------------------------------------------------------


def _resident(key: str) -> float:
    """VmRSS or VmHWM of this process in MiB; nan where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return math.nan
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def memory(case: Case, which: str, wanted: str, device: torch.device) -> float:
    """MiB that an iteration of "ours" or "plain" needs at its peak, beyond what was there before it.

    An iteration on two images comes first: libraries that are loaded on first use are no part of the figure.
    """
    for batch in (2, case.batch):
        iteration = Iteration(case, batch=batch, n_steps=1, precision=wanted, device=device)
        cuda = iteration.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20 if cuda else _resident("VmRSS")
        iteration.run.iterate() if which == "ours" else iteration.plain.iterate(iteration.x, iteration.y)
    return (torch.cuda.max_memory_allocated() / 2**20 if cuda else _resident("VmHWM")) - before


def _memory_elsewhere(case: Case, which: str, wanted: str, device: torch.device) -> float:
    """`memory` in a process of its own, since a process's peak never falls.

    There glibc gives blocks of 64 KiB and more back at once, so that the figure is what the tensors need and not what
    the heap's holes add to it.
    """
    call = "import json, sys, torch; from jemlib.benchmark import Case, memory; "
    call += "torch.set_num_threads(int(sys.argv[2])); case, which, wanted, device = json.loads(sys.argv[1]); "
    call += "print(memory(Case(*case), which, wanted, torch.device(device)))"
    arguments = json.dumps([case, which, wanted, str(device)])
    command = [sys.executable, "-c", call, arguments, str(torch.get_num_threads())]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=repo_root(), env=environment)
    return float(done.stdout.split()[-1])


# --- the suite ----------------------------------------------------------------------------------------------


def suite(store: Store, names: Iterable[str], wanted: str = "auto", *, growth: bool = True) -> pd.DataFrame:
    """Run the comparison for the named cases and write tables/benchmark.csv, _parts.csv and _growth.csv.

    Where the device has bfloat16, `auto` is compared both in it and in float32. On CUDA there are no parts.
    """
    device = pick_device("auto")
    machine = provenance()
    gpu = device.type == "cuda"
    about = {"device": machine["device" if gpu else "cpu"], "gpu": gpu, "torch": torch.__version__}
    about["commit"] = f"{machine['commit'] or 'unknown'}"[:10] + ("-changed" if machine["dirty"] else "")
    rows, parts, table = [], [], pd.DataFrame()
    for name in names:
        case = CASES[name]._replace(**_ON_GPU) if gpu else CASES[name]
        default = precision.choose(wanted, device, case.network["network"])
        for kind in ["bfloat16", "float32"] if wanted == "auto" and default is torch.bfloat16 else [wanted]:
            peak = {which: _memory_elsewhere(case, which, kind, device) for which in ("plain", "ours")}
            for what in ("sgld step", "iteration"):
                row = compare(name, case, what, kind, device)
                if what == "iteration":
                    row |= {f"{which}_peak_mb": value for which, value in peak.items()}
                    row["memory_ratio"] = peak["ours"] / peak["plain"]
                rows.append(row | about)
                print(_said(row), flush=True)
                # row by row: what an interrupted suite has measured is kept
                table = store.table("benchmark", pd.DataFrame(rows).reindex(columns=_COLUMNS))
            if not gpu:
                parts.append(_parts(name, case, kind, device) | about)
                store.table("benchmark_parts", pd.DataFrame(parts))
    if growth:
        store.table("benchmark_growth", _growth(wanted, device, about))
    return table


def _parts(name: str, case: Case, kind: str, device: torch.device) -> dict[str, Any]:
    """What the time of our SGLD step is made of."""
    steps = min(case.n_steps, 10)
    iteration = Iteration(case, batch=case.batch, n_steps=steps, precision=kind, device=device)
    used = str(iteration.run.dtype).removeprefix("torch.")
    about = {"network": name, "batch": case.batch, "precision": used}
    return about | {"threads": torch.get_num_threads()} | step_profile.shares(iteration.run.move, iteration.x)


def _growth(wanted: str, device: torch.device, about: dict[str, Any]) -> pd.DataFrame:
    """The MNIST net's iteration as one size grows, or the number of threads."""
    base, threads = CASES["MNIST net"]._replace(repeats=5), torch.get_num_threads()
    sizes = [(key, value) for key, values in _GROWTH.items() for value in values]
    if device.type == "cpu":
        cores = os.cpu_count() or 1
        sizes += [("threads", 2**i) for i in range(cores.bit_length()) if 2**i <= cores]
    rows = []
    for key, value in sizes:
        case = base._replace(**{key: value}) if key in ("batch", "n_steps") else base
        if key == "width":
            case = base._replace(network=base.network | {"width": value})
        torch.set_num_threads(value if key == "threads" else threads)
        row = compare("MNIST net", case, "iteration", wanted, device)
        rows.append({"growing": key, "value": value} | row | about)
        print(f"{key} {value}: {_said(row)}", flush=True)
    torch.set_num_threads(threads)
    return pd.DataFrame(rows)


def _said(row: dict[str, Any]) -> str:
    memory = f", memory {row['memory_ratio']:.2f}" if "memory_ratio" in row else ""
    return (
        f"{row['network']}, {row['what']}, {row['precision']}: "
        f"ours {row['ours_ms']:.4g} ms, plain {row['plain_ms']:.4g} ms, "
        f"plain / ours {row['ratio']:.2f} (median of pairs), "
        f"{row['share_of_peak']:.0%} of the matrix product's peak{memory}"
    )
