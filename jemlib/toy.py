"""Labelled distributions on [-1, 1]^2 whose class-conditional densities are known in closed form.

Classes are balanced; the mass outside the square is below 1e-6. Everything is float64 unless asked otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TAU = 2 * math.pi


@dataclass(frozen=True)
class Rings:
    """Concentric rings: the angle is uniform, the radius normal. p(x given y) = N(r; radius_y, width^2) / (2 pi r)."""

    radii: tuple[float, ...] = (0.36, 0.65)
    width: float = 0.07

    @property
    def n_classes(self) -> int:
        return len(self.radii)

    def log_conditional(self, x: Tensor) -> Tensor:
        """log p(x given y) of points (B, 2), as (B, K), in nats."""
        r = x.norm(dim=1, keepdim=True).clamp_min(1e-12)
        return _log_normal(r - torch.tensor(self.radii, dtype=x.dtype), self.width) - (TAU * r).log()

    def place(self, y: Tensor, noise: Tensor, uniform: Tensor) -> Tensor:
        r = torch.tensor(self.radii, dtype=torch.float64)[y] + self.width * noise[:, 0]
        return torch.stack([r * (TAU * uniform).cos(), r * (TAU * uniform).sin()], dim=1)


@dataclass(frozen=True)
class Pinwheel:
    """Gaussian blades, swirled: each point is turned by an angle that depends on its radius only.

    Such a swirl keeps areas, so the density is the Gaussian's at the point turned back.
    """

    n_classes: int = 3
    radius: float = 0.46
    widths: tuple[float, float] = (0.1, 0.06)  #: along and across the radius
    swirl: float = 3.0  #: radians per unit of radius

    def log_conditional(self, x: Tensor) -> Tensor:
        """log p(x given y) of points (B, 2), as (B, K), in nats."""
        angle = self._angle(torch.arange(self.n_classes), x.norm(dim=1, keepdim=True))
        back = _rotate(x[:, None, :].expand(-1, self.n_classes, -1), -angle)
        along, across = self.widths
        return _log_normal(back[..., 0] - self.radius, along) + _log_normal(back[..., 1], across)

    def place(self, y: Tensor, noise: Tensor, uniform: Tensor) -> Tensor:
        z = noise * torch.tensor(self.widths, dtype=torch.float64)
        z[:, 0] += self.radius
        return _rotate(z, self._angle(y, z.norm(dim=1)))

    def _angle(self, y: Tensor, r: Tensor) -> Tensor:
        return TAU * y / self.n_classes + self.swirl * (r - self.radius)


@dataclass(frozen=True)
class Spirals:
    """Interleaved arms, each an equal mixture of isotropic Gaussians along a spiral."""

    n_classes: int = 2
    n_components: int = 64  #: Gaussians along an arm
    width: float = 0.045
    turns: float = 0.9

    def _centres(self, dtype: torch.dtype) -> Tensor:
        t = torch.linspace(0, 1, self.n_components, dtype=dtype).sqrt()  # even spacing along the arm
        angle = TAU * (self.turns * t + torch.arange(self.n_classes, dtype=dtype)[:, None] / self.n_classes)
        r = 0.15 + 0.59 * t
        return torch.stack([r * angle.cos(), r * angle.sin()], dim=-1)  # (K, n_components, 2)

    def log_conditional(self, x: Tensor) -> Tensor:
        """log p(x given y) of points (B, 2), as (B, K), in nats."""
        offset = x[:, None, None, :] - self._centres(x.dtype)
        return _log_normal(offset, self.width).sum(-1).logsumexp(-1) - math.log(self.n_components)

    def place(self, y: Tensor, noise: Tensor, uniform: Tensor) -> Tensor:
        return self._centres(torch.float64)[y, (uniform * self.n_components).long()] + self.width * noise


class Toy:
    """A labelled 2D distribution: exact densities and a sampler. `name` is one of `DISTRIBUTIONS`."""

    def __init__(self, name: str):
        if name not in DISTRIBUTIONS:
            raise ValueError(f"no toy distribution is called {name!r}; there are {', '.join(DISTRIBUTIONS)}")
        self.name, self.shape = name, DISTRIBUTIONS[name]
        self.n_classes = self.shape.n_classes

    def log_joint(self, x: Tensor) -> Tensor:
        """log p(x, y) of points (B, 2), as (B, K), in nats."""
        return self.shape.log_conditional(x) - math.log(self.n_classes)

    def sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """n labelled points as (x (n, 2) float64, y (n,)); labels in equal shares, in random order."""
        y = (torch.arange(n) % self.n_classes)[torch.randperm(n, generator=generator)]
        x = torch.full((n, 2), math.inf, dtype=torch.float64)
        while len(outside := (x.abs() > 1).any(1).nonzero()[:, 0]):  # truncation to the square
            noise = torch.randn(len(outside), 2, dtype=torch.float64, generator=generator)
            uniform = torch.rand(len(outside), dtype=torch.float64, generator=generator)
            x[outside] = self.shape.place(y[outside], noise, uniform)
        return x, y


DISTRIBUTIONS = {"rings": Rings(), "pinwheel": Pinwheel(), "spirals": Spirals()}


def _log_normal(offset: Tensor, width: float) -> Tensor:
    return -0.5 * (offset / width).square() - math.log(width * math.sqrt(TAU))


def _rotate(x: Tensor, angle: Tensor) -> Tensor:
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([cos * x[..., 0] - sin * x[..., 1], sin * x[..., 0] + cos * x[..., 1]], dim=-1)
