"""dE/dx of a network whose weights are frozen while chains move, by hand, layer by layer.

Autograd finds the same gradient in more time. Here weights are cast, turned and packed once for all steps of a call;
activations and sums that follow a convolution are part of it where oneDNN offers that; and a batch goes forward and
back in pieces that a core's cache can hold, since chains do not depend on each other.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from jemlib import frozen_layers, nets
from jemlib.energy import JEM, energy_from_logits
from jemlib.frozen_layers import Layer
from jemlib.sampler import by_autograd

#: bytes of the largest activation of a piece of the batch, for each thread of a CPU: an L2 cache of today
_PIECE = 2**21


class FrozenJEM:
    """A model's energies and their input gradients, with the weights of the last `refresh`, in eval mode.

    For `sgld`, in one thread at a time. dtype: what the network computes in, float32 or bfloat16. The networks of
    `nets` are differentiated by hand, any other by autograd on a copy.
    """

    def __init__(self, model: JEM, dtype: torch.dtype = torch.float32):
        self.model, self.dtype = model, dtype
        self.layers = frozen_layers.of(model.backbone, dtype) if _known(model) else []
        self.copy = None if self.layers else copy.deepcopy(model).to(dtype).requires_grad_(False).eval()
        self.widest: dict[torch.Size, int] = {}
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the model's present weights."""
        for layer in self.layers:
            layer.refresh()
        if self.copy:
            for part in ("parameters", "buffers"):
                for mine, its in zip(getattr(self.copy, part)(), getattr(self.model, part)(), strict=True):
                    mine.copy_(its)

    @torch.no_grad()
    def energy(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """E(x), or E(x, y) for labels y (B,), as (B,) in float32, without a graph. Equations (1) and (2)."""
        return self._energy_of_copy(x, y) if self.copy else energy_from_logits(self._forward(x)[0], y)

    @torch.no_grad()
    def energy_and_gradient(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(E, dE/dx) at x (B, ...), of E(x) or, for labels y (B,), of E(x, y): (B,) in float32, and like x.

        By the chain rule: dE/df is -softmax(f), or minus the indicator of y, and goes back through the layers.
        """
        if self.copy:
            return by_autograd(self._energy_of_copy, x, y)
        energies, gradient = torch.empty(len(x), device=x.device), torch.empty_like(x)
        for part in self._pieces(x):
            f, kept = self._forward(x[part])
            label = None if y is None else y[part]
            energies[part] = energy_from_logits(f, label)
            shares = f.softmax(1) if label is None else torch.zeros_like(f).scatter_(1, label[:, None], 1)
            grad = shares.neg_()
            for layer in reversed(self.layers):
                grad = layer.backward(grad, kept.pop())
            gradient[part] = grad
        return energies, gradient

    def _energy_of_copy(self, x: Tensor, y: Tensor | None) -> Tensor:
        return self.copy.energy(x.to(self.dtype, copy=True), y)  # a layer may write to what it is given

    def _forward(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        """Logits, in float32 as their layer is, and what each layer keeps for the way back."""
        x, kept = x.to(self.dtype), []
        for layer in self.layers:
            x, keep = layer.forward(x)
            kept.append(keep)
        return x, kept

    def _pieces(self, x: Tensor) -> list[slice]:
        """What to move at a time: on a CPU equal parts, whose activations stay in the cache; else everything."""
        if len(x) == 0:
            return []
        count = 1
        if x.device.type == "cpu":
            shape = x.shape[1:]
            if shape not in self.widest:
                self.widest[shape] = _widest(self.layers, x[:1].to(self.dtype))
            most = _PIECE * torch.get_num_threads() // (self.widest[shape] * self.dtype.itemsize)
            count = math.ceil(len(x) / max(most, 1))
        size = math.ceil(len(x) / count)
        return [slice(i, i + size) for i in range(0, len(x), size)]


def _widest(layers: list[Layer], x: Tensor) -> int:
    """Numbers in the largest output of a layer for one input."""
    widest = 1
    for layer in layers:
        x, _ = layer.forward(x)
        widest = max(widest, x.numel())
    return widest


def _known(model: JEM) -> bool:
    """Whether the model is a JEM whose network is as `nets` builds it, and nothing hooks into it."""
    plain = type(model).logits is JEM.logits and type(model).energy is JEM.energy
    ours = type(model.backbone) is nets.Network and all(
        type(module) in frozen_layers.MODULES for module in model.backbone.modules()
    )
    return plain and ours and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
