"""JEM's training iteration written the usual way from the algorithm: what `python -m jemlib benchmark` compares with.

Grathwohl et al. (2020), as published: float32, NCHW, parameters that require gradients while chains move, the graph of
each step retained, the buffer on the CPU, uniform noise made there, and a forward pass each for p(x) on data, p(x) on
samples and p(y given x). Nothing of jemlib's speed is in here: the networks are of torch's own layers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jemlib import layers, nets
from jemlib.energy import JEM


class _Block(nn.Module):
    def __init__(self, residual: nn.Module, shortcut: nn.Module):
        super().__init__()
        self.residual, self.shortcut = residual, shortcut

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.residual(x)


def usual_layers(model: JEM) -> JEM:
    """A copy of the model with torch's own layers in NCHW, and the same weights."""
    return _usual(copy.deepcopy(model)).to(memory_format=torch.contiguous_format)


def _usual(module: nn.Module) -> nn.Module:
    if isinstance(module, layers.LeakyReLU):
        return nn.LeakyReLU(module.slope)
    if isinstance(module, nn.LeakyReLU):
        return nn.LeakyReLU(module.negative_slope)
    if isinstance(module, nets._Block):
        return _Block(_usual(module.residual), _usual(module.shortcut))
    for name, child in module.named_children():
        setattr(module, name, _usual(child))
    return module


def langevin_step(model: JEM, x: Tensor, step_size: float, noise_std: float) -> Tensor:
    """One step of SGLD: x <- x - (step_size / 2) dE/dx + noise."""
    x = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(model.energy(x).sum(), [x], retain_graph=True)
    return (x - step_size / 2 * gradient + noise_std * torch.randn_like(x)).detach()


@dataclass
class PlainJEM:
    """Everything that an iteration touches; `iterate` is one of them, on a batch (x, y)."""

    model: JEM
    buffer: Tensor  #: (N, ...) on the CPU
    n_steps: int
    step_size: float = 2.0
    noise_std: float = 0.01
    reinit_prob: float = 0.05
    lr: float = 1e-4

    def __post_init__(self):
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.lr, betas=(0.0, 0.999))

    def sample(self, batch: int, device: torch.device) -> Tensor:
        """Chains out of the buffer, some started anew, moved and put back."""
        index = torch.randint(len(self.buffer), (batch,))
        fresh = torch.empty(batch, *self.buffer.shape[1:]).uniform_(-1, 1)
        anew = (torch.rand(batch) < self.reinit_prob).float().view(-1, *[1] * (fresh.dim() - 1))
        x = (anew * fresh + (1 - anew) * self.buffer[index]).to(device)
        self.model.eval()
        for _ in range(self.n_steps):
            x = langevin_step(self.model, x, self.step_size, self.noise_std)
        self.model.train()
        self.buffer[index] = x.cpu()
        return x

    def iterate(self, x: Tensor, y: Tensor) -> float:
        """One iteration of JEM on data x (B, ...) with labels y (B,); the loss."""
        x_neg = self.sample(len(x), x.device)
        loss = self.model.energy(x).mean() - self.model.energy(x_neg).mean()
        loss = loss + F.cross_entropy(self.model.logits(x), y)
        if not torch.isfinite(loss):
            raise FloatingPointError("the plain iteration diverged")
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()
