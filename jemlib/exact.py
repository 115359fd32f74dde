"""What can be computed exactly: densities, Z, information and gradients by a sum over a finite set of points.

Points are the cells of a grid on [-1, 1]^2 or the states of a finite space; each has a mass (the cell's area, or 1).
One code path serves both: an integral is sum_s mass_s * (...). `logits` (S, K) are f(x_s)_y = -E(x_s, y); all
densities are logarithms with respect to the masses; use float64.

What a method's update converges to follows from its expectation over infinitely many data and samples. With data
density p_d(x, y), samples of density q, and m what stands in the denominator (q, or p_d/2 + q/2 with the whole batch),
the gradient with respect to f(x)_y vanishes where exp(f(x)_y) is proportional to p_d(x, y) / m(x).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from jemlib.objectives import Method


class Space(NamedTuple):
    """A finite set of points (S, D) and the logarithm of each point's mass (S,)."""

    points: Tensor
    log_mass: Tensor

    @classmethod
    def grid(cls, n: int, low: float = -1.0, high: float = 1.0) -> Space:
        """Midpoints of n x n cells of the square [low, high]^2, in rows of constant x_2; the mass is the area."""
        cell = (high - low) / n
        axis = low + cell * (torch.arange(n, dtype=torch.float64) + 0.5)
        x2, x1 = torch.meshgrid(axis, axis, indexing="ij")
        points = torch.stack([x1.flatten(), x2.flatten()], dim=1)
        return cls(points, torch.full((n * n,), 2 * math.log(cell), dtype=torch.float64))

    @classmethod
    def states(cls, n: int) -> Space:
        """n states of mass 1; the points (n, 1) are their numbers."""
        return cls(torch.arange(n, dtype=torch.float64)[:, None], torch.zeros(n, dtype=torch.float64))


# --- densities ----------------------------------------------------------------------------------------------


def log_z(logits: Tensor, log_mass: Tensor) -> Tensor:
    """log Z of p(x, y) = exp(f(x)_y) / Z, a scalar in nats. Equations (1) and (2)."""
    return (logits.logsumexp(1) + log_mass).logsumexp(0)


def log_joint(logits: Tensor, log_mass: Tensor) -> Tensor:
    """log p(x, y) as (S, K). Equation (2)."""
    return logits - log_z(logits, log_mass)


def log_marginal(logits: Tensor, log_mass: Tensor) -> Tensor:
    """log p(x) as (S,). Equation (1)."""
    return log_joint(logits, log_mass).logsumexp(1)


def log_labels(logits: Tensor, log_mass: Tensor) -> Tensor:
    """log p(y) as (K,)."""
    return (log_joint(logits, log_mass) + log_mass[:, None]).logsumexp(0)


def log_conditional(logits: Tensor, log_mass: Tensor) -> Tensor:
    """log p(x given y) as (S, K), each column normalized. Equation (16)."""
    return logits - (logits + log_mass[:, None]).logsumexp(0)


def nll(f_pos: Tensor, y: Tensor, logits: Tensor, log_mass: Tensor) -> Tensor:
    """Mean of -log p(x, y) over data with logits f_pos (B, K) and labels y (B,), log Z by the sum over all points.

    Its gradient is Equation (4) with the expectation done exactly: the loss of the oracle.
    """
    return log_z(logits, log_mass) - f_pos.gather(1, y[:, None]).mean()


def kl(log_p: Tensor, log_q: Tensor, log_mass: Tensor) -> Tensor:
    """KL(p || q) in nats; both (S,) or both (S, K). Points where p is 0 add nothing."""
    mass = log_mass if log_p.dim() == 1 else log_mass[:, None]
    p = (log_p + mass).exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum()


def draw(log_p: Tensor, log_mass: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Indices (n,) of points drawn from a density log_p (S,) with replacement."""
    return torch.multinomial((log_p + log_mass).softmax(0), n, replacement=True, generator=generator)


# --- mutual information -------------------------------------------------------------------------------------


def mutual_information(logits: Tensor, log_mass: Tensor) -> dict[str, Tensor]:
    """I(X; Y) of p(x, y) in nats, by three forms that must agree.

    "kl": KL(p(x, y) || p(x) p(y)), Equation (12); "posterior": E[log p(y given x)] + H(p(y)), Equation (14);
    "entropies": h(X) - h(X given Y), differential entropies with respect to the masses.
    """
    joint, label = log_joint(logits, log_mass), log_labels(logits, log_mass)
    marginal, conditional = joint.logsumexp(1), log_conditional(logits, log_mass)
    p = (joint + log_mass[:, None]).exp()
    label_entropy = -(label.exp() * label).sum()
    return {
        "kl": kl(joint, marginal[:, None] + label, log_mass),
        "posterior": (p * logits.log_softmax(1)).sum() + label_entropy,
        "entropies": -(p.sum(1) * marginal).sum() + (p * conditional).sum(),
    }


# --- the update in expectation ------------------------------------------------------------------------------


def sampler_density(method: Method, logits: Tensor, log_mass: Tensor, uniform_share: float = 0.0) -> Tensor:
    """log q(x given y) of a method's samples, as (S, K): a share is uniform noise, the rest exact model samples.

    A share of 0 is a perfect sampler, 1 one that failed. Chains of p(x) have the same density for every label.
    """
    log_uniform = torch.full_like(logits, -float(log_mass.logsumexp(0)))
    if uniform_share == 1:
        return log_uniform
    exact = log_conditional(logits, log_mass)
    if not method.conditional:
        exact = log_marginal(logits, log_mass)[:, None].expand_as(logits)
    if uniform_share == 0:
        return exact
    return torch.logaddexp(math.log(uniform_share) + log_uniform, math.log1p(-uniform_share) + exact)


def expected_loss(
    method: Method, logits: Tensor, log_data: Tensor, log_q: Tensor, log_mass: Tensor, n_samples: float = math.inf
) -> Tensor:
    """The loss of a method for infinitely many data of density log_data (S, K) and samples of density log_q (S, K).

    log_q is given, not differentiated through; the labels of the samples occur as often as the data's. The own
    anchor's share of the candidates is 1 / (n_samples + 1), of which only the size matters, not the randomness.
    """
    p = (log_data + log_mass[:, None]).exp()
    label = p.sum(0)
    log_q = log_q.detach()
    total = -method.classify * (p * logits.log_softmax(1)).sum()
    log_mix = (log_q + label.log()).logsumexp(1)  # q(x), all labels together
    if method.generative == "x":
        return total + (((log_mix + log_mass).exp() - p.sum(1)) * logits.logsumexp(1)).sum()
    if method.generative == "xy" or (method.generative == "x|y" and method.exponent == 0 and method.anchor == "none"):
        return total + (((log_q + log_mass[:, None]).exp() * label - p) * logits).sum()
    if method.generative == "none":
        return total
    if method.exponent == 0:
        raise ValueError("a plain average with an anchor has no use: the anchor's gradient cancels the datum's")
    if method.anchor == "batch":  # as many data as samples
        log_mix = torch.logaddexp(log_data.logsumexp(1), log_mix) - math.log(2)
    scaled = method.exponent * logits
    phase = (scaled + (log_mix + log_mass)[:, None]).logsumexp(0).expand_as(logits)
    if method.anchor == "own" and n_samples < math.inf:
        share = 1 / (n_samples + 1)
        phase = torch.logaddexp(math.log(share) + scaled, math.log1p(-share) + phase)
    return total + (p * (phase / method.exponent - logits)).sum()


def expected_update(method: Method, logits: Tensor, log_data: Tensor, log_q: Tensor, log_mass: Tensor, **options):
    """Minus the gradient of `expected_loss` with respect to the table of logits, as (S, K)."""
    logits = logits.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(expected_loss(method, logits, log_data, log_q, log_mass, **options), logits)
    return -gradient


class Stationary(NamedTuple):
    """Where an update came to rest: logits (S, K), "converged", "diverged" or "unfinished", and the steps it took."""

    logits: Tensor
    status: str
    steps: int


def stationary(
    method: Method,
    log_data: Tensor,
    log_mass: Tensor,
    uniform_share: float = 0.0,
    *,
    n_samples: float = math.inf,
    rate: float = 0.4,
    limit: float = 1e3,
    tolerance: float = 1e-9,
    max_steps: int = 20_000,
) -> Stationary:
    """Follow the expected update of a free table of logits from f = 0 until it rests or |f| exceeds `limit`.

    The step of each entry is scaled by 1 / p_d(x, y) and is at most 1: the zeros of the update stay where they are,
    and rare states do not need millions of steps. "converged": the largest step is below `tolerance`.
    """
    scale = rate / (log_data + log_mass[:, None]).exp().clamp_min(1e-8)
    logits = torch.zeros_like(log_data)
    for n in range(1, max_steps + 1):
        log_q = sampler_density(method, logits, log_mass, uniform_share)
        update = expected_update(method, logits, log_data, log_q, log_mass, n_samples=n_samples)
        step = (update * scale).clamp(-1, 1)
        logits = logits + step
        if float(step.abs().max()) < tolerance:
            return Stationary(logits, "converged", n)
        if float(logits.abs().max()) > limit:
            return Stationary(logits, "diverged", n)
    return Stationary(logits, "unfinished", max_steps)


def predicted(method: Method, log_data: Tensor, log_mass: Tensor, sampler: str) -> Tensor | None:
    """log p(x, y) as (S, K) that a method comes to rest at, for a sampler that is "perfect" or "uniform"; else None.

    Weights tempered by an exponent in (0, 1) are solved for a single label only: with more, the weighted term and
    the cross-entropy ask for different posteriors, and no closed form is known.
    """
    if sampler not in ("perfect", "uniform"):
        raise ValueError(f"sampler must be perfect or uniform, got {sampler!r}")
    if method.generative == "none":
        return None
    if method.generative != "x|y" or method.exponent == 0:
        return log_joint(log_data, log_mass) if sampler == "perfect" else None
    log_x = log_data.logsumexp(1)
    log_uniform = -log_mass.logsumexp(0)
    if method.exponent < 1:
        if log_data.shape[1] > 1 or method.anchor == "batch":
            raise ValueError("tempered weights have a closed form for one label and no whole-batch anchor")
        power = 1 / (1 + method.exponent) if sampler == "perfect" else 1 / method.exponent
        return log_joint(power * log_data, log_mass)
    if sampler == "uniform":
        log_m = torch.zeros_like(log_x) + log_uniform
        log_m = torch.logaddexp(log_x, log_m) if method.anchor == "batch" else log_m
        return log_joint(log_data - log_m[:, None], log_mass)
    # exact samples: q(x) = sum_y p_d(y) p(x given y), which is p(x) r(x) with r = sum_y p_d(y given x) p_d(y) / p(y)
    log_label = log_model_label = log_labels(log_data, log_mass)
    change = 1.0
    while change > 1e-12:
        log_r = (log_data.log_softmax(1) + log_label - log_model_label).logsumexp(1)
        density = _quadratic(log_x, log_r, log_mass) if method.anchor == "batch" else (log_x - log_r) / 2
        joint = log_joint(log_data.log_softmax(1) + density[:, None], log_mass)
        change = float((log_labels(joint, log_mass) - log_model_label).abs().max())
        log_model_label = log_labels(joint, log_mass)
    return joint


def _quadratic(log_data: Tensor, log_r: Tensor, log_mass: Tensor) -> Tensor:
    """The density p with p (p_d + r p) = c p_d, c such that it is normalized: p ∝ p_d / (p_d/2 + q/2), q = r p."""
    data, r = log_data.exp(), log_r.exp()
    low, high = -60.0, 60.0
    for _ in range(56):  # the mass grows with c: bisection on log c
        log_c = (low + high) / 2
        root = (data.square() + 4 * math.exp(log_c) * r * data).sqrt()
        log_p = math.log(2) + log_c + log_data - (data + root).clamp_min(1e-300).log()
        low, high = (log_c, high) if float((log_p + log_mass).logsumexp(0)) < 0 else (low, log_c)
    return log_p
