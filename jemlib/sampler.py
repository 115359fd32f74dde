"""Stochastic gradient Langevin dynamics (SGLD) and the buffer of persistent chains.

The update, for a chain x, is Equation (5) in terms of the energy:

    x <- x - (step_size / 2) * dE/dx + u,    u ~ N(0, noise_std^2)

With `noise_std=None` the noise is sqrt(step_size * temperature), which is Equation (5) itself. The practical form
sets `step_size` and `noise_std` apart; the chain then targets exp(-E / T) with T = noise_std^2 / step_size, and
`implied_temperature` says so. Both go through the same code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

Schedule = Callable[[int], float]


class HasEnergy(Protocol):
    """Whatever offers energy(x, y=None) -> (B,); a `JEM`, or an analytic density in a test."""

    def energy(self, x: Tensor, y: Tensor | None = None) -> Tensor: ...


class SGLDHealth(NamedTuple):
    """What a call of `sgld` did to its chains; 0-dimensional tensors, no device synchronisation.

    Quantities that compare two states cover the n_steps - 1 transitions whose both ends were evaluated (a last
    evaluation would cost as much as a step); with a single step they are nan.
    """

    energy_change: Tensor  #: mean over chains of E(last evaluated) - E(start), nats
    uphill_share: Tensor  #: share of transitions that raised the energy; 1 means that the steps overshoot
    rms_step: Tensor  #: root mean square over pixels of the gradient part of a step, in units of x
    acceptance: Tensor  #: mean acceptance rate that a Metropolis test at the implied temperature would have had

    def merged(self, mean: Callable[[Tensor], Tensor]) -> SGLDHealth:
        """The health of chains in equal parts, from this part's and a function that averages over the parts."""
        squared = self._replace(rms_step=self.rms_step.square())
        merged = SGLDHealth(*mean(torch.stack(list(squared))))
        return merged._replace(rms_step=merged.rms_step.sqrt())


def constant(step_size: float) -> Schedule:
    """The same step size at every step."""
    return lambda t: step_size


def polynomial_decay(a: float, b: float, gamma: float) -> Schedule:
    """a (b + t)^-gamma: for 1/2 < gamma <= 1 the sum diverges and the sum of squares converges (Equation 5)."""
    if not 0.5 < gamma <= 1:
        raise ValueError(f"gamma must lie in (0.5, 1] for SGLD to converge, got {gamma}")
    return lambda t: a * (b + t) ** -gamma


def implied_temperature(step_size: float, noise_std: float) -> float:
    """The temperature T that a step size and a noise set apart amount to: noise_std^2 / step_size."""
    return noise_std**2 / step_size


@contextmanager
def frozen(model: object) -> Iterator[None]:
    """Inside: no parameter asks for a gradient and modules are in eval mode; outside: all flags as they were.

    Freezing spares autograd the weights' half of every backward pass.
    """
    if not isinstance(model, nn.Module):
        yield
        return
    flags = [(p, p.requires_grad) for p in model.parameters()]
    modes = [(m, m.training) for m in model.modules()]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(False)
        model.eval()
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        for module, mode in modes:  # .train() recurses, so each module's own flag is set
            module.training = mode


def energy_and_gradient(model: HasEnergy, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(E, dE/dx), as (B,) and (B, ...), without a graph: as the model finds them itself, else by autograd."""
    if hasattr(model, "energy_and_gradient"):
        return model.energy_and_gradient(x, y)
    return by_autograd(model.energy, x, y)


def by_autograd(energy: Callable[..., Tensor], x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """(E, dE/dx) of energy(x, y) -> (B,), without a graph."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        found = energy(x, y)
        (gradient,) = torch.autograd.grad(found.sum(), x)
    return found.detach(), gradient


def _reflect(x: Tensor, low: float, high: float) -> Tensor:
    """Fold x back into [low, high] as a mirror at both walls would; keeps a uniform density uniform."""
    width = high - low
    return low + width - ((x - low).remainder(2 * width) - width).abs()


def sgld(
    model: HasEnergy,
    x: Tensor,
    y: Tensor | None = None,
    *,
    n_steps: int,
    step_size: float | Schedule,
    noise_std: float | None = None,
    temperature: float = 1.0,
    max_rms_step: float | None = None,
    clip_grad: float | None = None,
    bounds: tuple[float, float] | None = None,
    at_bounds: str = "clamp",
    generator: torch.Generator,
    share: tuple[int, int] = (0, 1),
) -> tuple[Tensor, SGLDHealth]:
    """Run SGLD chains from x and return where they end, and their health.

    x: (B, ...) starting points, left untouched; y: (B,) labels for chains of p(x given y), or None for p(x).
    step_size: a number or a schedule t -> number. noise_std: standard deviation of the noise in units of x; None
    takes Equation (5)'s sqrt(step_size * temperature). clip_grad: largest |dE/dx| per element. max_rms_step: each
    chain's gradient step is scaled down so that its RMS over elements is at most this. bounds: (low, high) of the
    data; a chain that leaves is clamped, or reflected with at_bounds="reflect". share: (i, n) where x is the i-th of n
    equal parts of a batch, whose chains then move as they would in one piece. Returns ((B, ...), SGLDHealth);
    the samples carry no graph. The model's parameters, their flags and its train/eval mode are left as they were.
    """
    if n_steps < 0:
        raise ValueError(f"n_steps must be 0 or more, got {n_steps}")
    if at_bounds not in ("clamp", "reflect"):
        raise ValueError(f"at_bounds must be 'clamp' or 'reflect', got {at_bounds!r}")
    schedule = step_size if callable(step_size) else constant(step_size)
    x = x.detach().clone()
    per_chain, size = tuple(range(1, x.dim())), math.prod(x.shape[1:])
    nan = torch.full((), math.nan, device=x.device)
    if n_steps == 0:
        return x, SGLDHealth(nan, nan, nan, nan)

    energies, squares, log_ratios, previous = [], [], [], None
    with frozen(model):
        for t in range(n_steps):
            alpha = schedule(t)
            sigma = math.sqrt(alpha * temperature) if noise_std is None else noise_std
            energy, gradient = energy_and_gradient(model, x, y)
            if clip_grad is not None:
                gradient = gradient.clamp(-clip_grad, clip_grad)
            drift = gradient.mul(-alpha / 2)
            if max_rms_step is not None:
                rms = torch.linalg.vector_norm(drift, dim=per_chain, keepdim=True) / math.sqrt(size)
                # clamp_max(1) leaves short steps alone; nan stays nan, so that divergence is seen
                drift.mul_((max_rms_step / rms.clamp_min(1e-30)).clamp_max(1.0))
            # norms, unlike sums of squares, need no copy
            here = _State(x, energy, drift, torch.linalg.vector_norm(drift, dim=per_chain).square(), sigma, alpha)
            energies.append(energy)
            squares.append(here.square)
            if previous is not None:
                log_ratios.append(_log_acceptance(previous, here))
            previous = here
            noise = _noise(x, generator, *share) if sigma > 0 else None
            x = x + drift
            if noise is not None:
                x.add_(noise, alpha=sigma)
            if bounds is not None:
                x = x.clamp_(*bounds) if at_bounds == "clamp" else _reflect(x, *bounds)
    path = torch.stack(energies)
    health = SGLDHealth(
        energy_change=(path[-1] - path[0]).mean() if n_steps > 1 else nan,
        uphill_share=(path[1:] > path[:-1]).float().mean() if n_steps > 1 else nan,
        rms_step=(torch.stack(squares).mean() / size).sqrt(),
        acceptance=torch.stack(log_ratios).clamp_max(0).exp().mean() if n_steps > 1 else nan,
    )
    return x, health


def _noise(x: Tensor, generator: torch.Generator, i: int, n: int) -> Tensor:
    """Standard normal noise like x: the i-th of n parts of the draw for the whole batch."""
    whole = torch.empty_like(x if n == 1 else torch.cat([x] * n))  # in x's memory format, which orders the draws
    return whole.normal_(generator=generator)[i * len(x) : (i + 1) * len(x)]


_NO_NOISE = 1e-12  # standard deviation of noise that moves nothing in 32 bits, and whose square divides badly


class _State(NamedTuple):
    """A chain's state at one step, kept until the next, when the move between the two can be judged."""

    x: Tensor
    energy: Tensor
    drift: Tensor
    square: Tensor  #: |drift|^2 of each chain
    sigma: float
    alpha: float


def _log_acceptance(start: _State, end: _State) -> Tensor:
    """Log ratio (B,) of the Metropolis-Hastings test for start -> end, for the target exp(-E alpha / sigma^2).

    With m the move and d, d' the two drifts: |m - d|^2 - |m + d'|^2 = |d|^2 - |d'|^2 - 2 m (d + d').
    Nobody needs `start` afterwards, and its drift serves as scratch.
    """
    if start.sigma <= _NO_NOISE:  # no noise, no reverse move: a Metropolis test would take descents only
        return torch.zeros_like(end.energy).masked_fill_(~(end.energy <= start.energy), -math.inf)
    projection = start.drift.add_(end.drift).mul_(end.x - start.x).sum(tuple(range(1, end.x.dim())))
    moves = (start.square - end.square - 2 * projection) / (2 * start.sigma**2)
    return (start.energy - end.energy) * (start.alpha / start.sigma**2) + moves


class ReplayBuffer:
    """Persistent chains (PCD): where the last call of SGLD left them, with the label each chain belongs to.

    What `draw` gives is a copy and what `put` takes is copied, so no graph and no alias of a step survives.
    Randomness is explicit: every method that draws takes a generator.
    """

    def __init__(
        self, x: Tensor, y: Tensor | None, *, low: float = -1.0, high: float = 1.0, starts: Tensor | None = None
    ):
        """x: (N, ...) chains; y: (N,) labels, or None for chains of p(x).

        A fresh chain is uniform on [low, high], or one of `starts` (K, M, ...): of its label, or of any without one.
        """
        self.x, self.y = x, y
        self.low, self.high = low, high
        self.starts = starts

    @classmethod
    def uniform(
        cls,
        size: int,
        shape: tuple[int, ...],
        *,
        n_classes: int | None = None,
        low: float = -1.0,
        high: float = 1.0,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
    ) -> ReplayBuffer:
        """A buffer of `size` uniform chains; with n_classes, labels in equal shares (sizes differ by 1 at most)."""
        x = uniform((size, *shape), low, high, generator=generator, device=device)
        y = None if n_classes is None else torch.arange(size, device=device) % n_classes
        return cls(x, y, low=low, high=high)

    @classmethod
    def from_starts(
        cls, size: int, starts: Tensor, *, labelled: bool, generator: torch.Generator, low: float, high: float
    ) -> ReplayBuffer:
        """A buffer of `size` chains drawn from starts (K, M, ...), in equal shares of the K classes."""
        y = torch.arange(size, device=starts.device) % len(starts)
        x = _pick(starts, y, generator)
        return cls(x, y if labelled else None, low=low, high=high, starts=starts)

    def __len__(self) -> int:
        return len(self.x)

    def draw(
        self, batch: int, *, reinit_prob: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Draw chains without replacement, each started anew with probability reinit_prob.

        Returns (index (B,), x (B, ...), y (B,) or None). A restarted chain keeps its label.
        """
        if batch > len(self):
            raise ValueError(f"a batch of {batch} chains cannot be drawn from a buffer of {len(self)}")
        device = self.x.device
        index = torch.randperm(len(self), generator=generator, device=device)[:batch]
        x = self.x[index]
        restart = torch.rand(batch, generator=generator, device=device) < reinit_prob
        y = None if self.y is None else self.y[index]
        if self.starts is None:
            fresh = uniform(x.shape, self.low, self.high, generator=generator, device=device, dtype=x.dtype)
        else:
            classes = y if y is not None else _integers(len(self.starts), batch, generator)
            fresh = _pick(self.starts, classes, generator)
        return index, torch.where(restart.view(-1, *[1] * (x.dim() - 1)), fresh, x), y

    def put(self, index: Tensor, x: Tensor) -> None:
        """Store chains x (B, ...) back at the places that `draw` gave."""
        self.x[index] = x.detach().to(self.x.dtype)

    def state_dict(self) -> dict:
        """Everything a checkpoint needs; `from_state` is the inverse."""
        y = None if self.y is None else self.y.clone()
        return {"x": self.x.clone(), "y": y, "low": self.low, "high": self.high}

    @classmethod
    def from_state(cls, state: dict, device: torch.device | str = "cpu", starts: Tensor | None = None) -> ReplayBuffer:
        """Rebuild a buffer from `state_dict`, on a device; starts, which come from the data, are given again."""
        x, y = (None if part is None else part.to(device, copy=True) for part in (state["x"], state["y"]))
        return cls(x, y, low=state["low"], high=state["high"], starts=starts)


def _integers(high: int, n: int, generator: torch.Generator) -> Tensor:
    return torch.randint(high, (n,), generator=generator, device=generator.device)


def _pick(starts: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    """For each label of y (B,) one of its class's starts (K, M, ...)."""
    return starts[y, _integers(starts.shape[1], len(y), generator)]


def uniform(shape, low: float, high: float, *, generator: torch.Generator, device="cpu", dtype=torch.float32) -> Tensor:
    """Uniform noise on [low, high], the law of a fresh chain."""
    return torch.empty(shape, device=device, dtype=dtype).uniform_(low, high, generator=generator)
