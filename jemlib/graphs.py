"""CUDA graphs: many small kernels started as one, so that the GPU never waits for Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Function = Callable[..., Any]


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor | None, ...]
    outputs: Any


def graphed(function: Function, generator: torch.Generator) -> Function:
    """`function` of CUDA tensors (or None), captured as a CUDA graph on the first call with each set of shapes.

    function may not depend on values on the host, and may draw from `generator` alone. What else it reads, such as
    weights, must stay where it is in memory; new values there are seen. The results, tensors in any nesting of tuples,
    are copies. A generator of another device leaves the function as it is.
    """
    if generator.device.type != "cuda":
        return function
    found: dict[tuple, _Captured] = {}

    def run(*inputs: Tensor | None) -> Any:
        key = tuple(None if x is None else (x.shape, x.dtype, x.stride()) for x in inputs)
        with torch.cuda.device(generator.device):  # streams and graphs are of the current one
            if key not in found:
                found[key] = _capture(function, inputs, generator)
            graph, static, outputs = found[key]
            for place, value in zip(static, inputs, strict=True):
                if place is not None:
                    place.copy_(value)
            graph.replay()
            return tree_map(torch.clone, outputs)

    return run


def _capture(function: Function, inputs: tuple[Tensor | None, ...], generator: torch.Generator) -> _Captured:
    static = tuple(None if x is None else x.clone() for x in inputs)
    state = generator.get_state()
    # a first run outside the graph: libraries choose kernels and make workspaces in it
    side = torch.cuda.Stream(generator.device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function(*static)
    torch.cuda.current_stream().wait_stream(side)
    generator.set_state(state)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph, stream=side):  # torch's own choice is one stream for all devices
        outputs = function(*static)
    return _Captured(graph, static, outputs)
