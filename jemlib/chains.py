"""The sampler of a run as one function: SGLD by its config, in the fastest form that the device has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jemlib import precision
from jemlib.config import TrainConfig, sampler_options
from jemlib.data import Labelled
from jemlib.distributed import ALONE, World
from jemlib.energy import JEM
from jemlib.graphs import graphed
from jemlib.input_gradient import FrozenJEM
from jemlib.sampler import SGLDHealth, sgld

Runner = Callable[[Tensor, Tensor | None], tuple[Tensor, SGLDHealth]]


def chain_runner(
    model: JEM, config: TrainConfig, generator: torch.Generator, world: World = ALONE, **options: Any
) -> Runner:
    """A function (x, y) -> (x, health) that runs `sgld` on the model's weights as they are at each call.

    The network computes in the config's precision; on CUDA the whole loop is one graph. world: x and y are this
    process's share of a batch. options: of `sgld`, in place of the config's.
    """
    device = generator.device
    network = FrozenJEM(model, precision.choose(config.precision, device, config.network))
    options = sampler_options(config) | options

    def run(x: Tensor, y: Tensor | None) -> tuple[Tensor, SGLDHealth]:
        network.refresh()
        return sgld(network, x, y, **options, generator=generator, share=world)

    return graphed(run, generator)


def class_gaussians(data: Labelled, n_classes: int, n: int, generator: torch.Generator) -> Tensor:
    """n draws a class from a Gaussian with the class's mean and covariance, cut to [-1, 1]: (K, n, ...).

    The informative start of JEM++. mean + X^T z / sqrt(m), with X the m centred images of a class and z standard
    normal, has that covariance exactly, without the matrix. Raises ValueError for a class without data.
    """
    found = []
    for k in range(n_classes):
        x = data.x[data.y == k].flatten(1)
        if len(x) == 0:
            raise ValueError(f"chain_start='class_gaussians' needs data of every class; class {k} has none")
        z = torch.empty((n, len(x)), device=x.device).normal_(generator=generator)
        mean = x.mean(0)
        found.append((mean + z @ (x - mean) / len(x) ** 0.5).clamp(-1, 1))
    return torch.stack(found).view(n_classes, n, *data.x.shape[1:])
