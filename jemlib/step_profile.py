"""Where the time of an SGLD step goes: shares of kinds of work, by torch's profiler."""

from __future__ import annotations

import os

import torch
from torch.profiler import ProfilerActivity, profile

from jemlib.chains import Runner

#: kind of work -> what the names of its operators hold; the first that fits
KINDS = {
    "convolutions": ("convolution", "mkldnn_conv"),
    "activations": ("leaky_relu", "silu"),
    "products": ("addmm", "::mm", "linear"),
    "noise": ("normal_",),
    "sums and copies": ("add", "sub", "mul", "copy", "cat", "mean", "sum", "norm", "clamp", "fill", "div"),
}


def shares(move: Runner, x: torch.Tensor, *, calls: int = 5) -> dict[str, float]:
    """Share of each kind of work in the CPU time of move(x, None), a runner of chains; "the rest" is everything else.

    Times of operators leave out those that they call. The profiler itself costs time, which small operators and "the
    rest", Python's part, show most.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler says that it finds no GPU
    move(x, None)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.profiler.record_function("all"):
        for _ in range(calls):
            move(x, None)
    events = profiler.key_averages()
    whole = next(event.cpu_time_total for event in events if event.key == "all")
    found = dict.fromkeys(KINDS, 0.0)
    for event in events:
        kind = next((kind for kind, parts in KINDS.items() if any(part in event.key for part in parts)), None)
        if kind is not None:
            found[kind] += event.self_cpu_time_total / whole
    return found | {"the rest": 1 - sum(found.values())}
