"""One training run on several processes, as `torchrun` starts them.

Every process holds the whole state: weights, optimizer, data, buffer and random streams, which all of them advance
alike. Only the network's work is split: each moves its share of the chains, and puts its share of data and samples
through the network. Logits and moved chains are gathered, so the softmax over the mini-batch means the same, and
gradients are summed. A checkpoint can therefore be resumed on any number of processes.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class World(NamedTuple):
    """This process among its equals."""

    rank: int = 0
    size: int = 1

    def mine(self, x: Tensor) -> Tensor:
        """This process's share of a batch (B, ...), B a multiple of the number of processes."""
        return x if self.size == 1 else x.tensor_split(self.size)[self.rank]

    def gather(self, x: Tensor) -> list[Tensor]:
        """The shares of all processes in order; the own one is `x` itself, with its graph."""
        if self.size == 1:
            return [x]
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(found, x.detach().contiguous())
        return [x if rank == self.rank else share for rank, share in enumerate(found)]

    def mean(self, x: Tensor) -> Tensor:
        """The mean of x over the processes."""
        if self.size == 1:
            return x
        x = x.detach().clone()
        dist.all_reduce(x)
        return x / self.size

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace every gradient by its sum over the processes."""
        grads = [p.grad for p in parameters if p.grad is not None]
        if self.size == 1 or not grads:
            return
        flat = torch.cat([g.flatten() for g in grads])  # one message in the place of many
        dist.all_reduce(flat)
        for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(part.view_as(g))

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.size > 1:
            dist.barrier()


ALONE = World()


def launched() -> World:
    """What torchrun's environment variables say; one process without them."""
    return World(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))


def join(device: torch.device) -> tuple[World, torch.device]:
    """Join the processes that torchrun started: NCCL on CUDA, one GPU each, else gloo. Returns (world, own device).

    The group has both where there is CUDA, since a later run may be on another device than the first. Raises
    ValueError where a process finds no GPU of its own.
    """
    world = launched()
    if world.size == 1:
        return world, device
    if device.type == "cuda":
        local, n = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= n:
            raise ValueError(
                f"process {local + 1} on this machine has no GPU, there being {n}; "
                f"start torchrun with --nproc-per-node={n} at most, or train on the CPU"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        both = torch.cuda.is_available() and dist.is_nccl_available()
        dist.init_process_group("cpu:gloo,cuda:nccl" if both else "gloo")
        atexit.register(dist.destroy_process_group)
        if world.rank > 0:
            os.environ["JEMLIB_PROGRESS"] = "none"  # the first process speaks for all
    return world, device
