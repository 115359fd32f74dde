"""Gradient estimators of log p(x given y) against the exact gradient: bias, spread and direction.

The model is small, so the gradient of every logit at every grid point fits into memory. An estimate is then drawn by
drawing points, taking the gradient of the very losses of `objectives` with respect to the table of logits, and
carrying it over to the parameters with one matrix product.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from jemlib import exact, nets, objectives
from jemlib.energy import JEM
from jemlib.exact import Space
from jemlib.objectives import METHODS, Method
from jemlib.toy import Toy

_NONE = replace(METHODS["st_jem_none"], classify=0.0)
ESTIMATORS: dict[str, Method] = {
    "plain average": replace(METHODS["st_jem_plain"], classify=0.0),
    "weights ^ 0.5": replace(_NONE, exponent=0.5),
    "weights": _NONE,
    "weights, own anchor": replace(_NONE, anchor="own"),
    "weights, whole batch": replace(_NONE, anchor="batch"),
}


def jacobian(model: JEM, points: Tensor, k: int) -> Tensor:
    """The gradient of f(x)_k with respect to all parameters at every point (S, D), as (S, P)."""
    parameters = dict(model.named_parameters())

    def at(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (x[None],))[0, k]

    rows = torch.func.vmap(torch.func.grad(at), in_dims=(None, 0))(parameters, points)
    return torch.cat([row.flatten(1) for row in rows.values()], dim=1).detach()


class Bench(NamedTuple):
    """A half-trained model and the data density on a grid, and what is exact about them."""

    space: Space
    log_data: Tensor  #: (S, K), log p_d(x, y)
    logits: Tensor  #: (S, K)
    rows: Tensor  #: (S * K, P), the gradient of each logit at each point
    gradient: Tensor  #: (P,), of the exact loss: the mean of -log p(x given y) over the data density


def bench(distribution: str = "rings", *, n: int = 32, width: int = 16, steps: int = 12, seed: int = 0) -> Bench:
    """A float64 multi-layer perceptron after a few steps of exact maximum likelihood on a toy distribution."""
    toy, space = Toy(distribution), Space.grid(n)
    log_data = exact.log_joint(toy.log_joint(space.points), space.log_mass)
    p = (log_data + space.log_mass[:, None]).exp()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = JEM(nets.mlp(toy.n_classes, width=width, input_scale=5.0)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        (-(p * exact.log_joint(model.logits(space.points), space.log_mass)).sum()).backward()
        optimizer.step()
    rows = torch.stack([jacobian(model, space.points, k) for k in range(toy.n_classes)], dim=1)
    logits = model.logits(space.points).detach().requires_grad_()
    loss = -(p * exact.log_conditional(logits, space.log_mass)).sum()
    (by_logit,) = torch.autograd.grad(loss, logits)
    rows = rows.flatten(0, 1)
    return Bench(space, log_data, logits.detach(), rows, by_logit.flatten() @ rows)


def estimates(
    b: Bench, method: Method, uniform_share: float, n_samples: int, repeats: int, generator: torch.Generator
) -> Tensor:
    """Gradients (repeats, P) of a method's loss on as many data as samples, n_samples each, labels in equal shares.

    Each sample is uniform noise with probability uniform_share, else exact from p(x given its label).
    """
    mass, n_classes = b.space.log_mass, b.logits.shape[1]
    log_q = exact.sampler_density(method, b.logits, mass, uniform_share)
    y = torch.arange(n_samples) % n_classes
    count = int((y == 0).sum()) * repeats  # at least as many as any other label needs
    draws = []
    for log_p in (b.log_data, log_q):
        by_label = [exact.draw(log_p[:, k], mass, count, generator) for k in range(n_classes)]
        draws.append(torch.stack([d.view(repeats, -1) for d in by_label], dim=2).flatten(1)[:, :n_samples])
    table = torch.zeros(repeats, *b.logits.shape, dtype=b.logits.dtype)
    for i, (positive, negative) in enumerate(zip(*draws, strict=True)):
        logits = b.logits.clone().requires_grad_()
        loss, _ = objectives.loss(method, logits[positive], y, logits[negative], y)
        (table[i],) = torch.autograd.grad(loss, logits)
    return table.flatten(1) @ b.rows


def compare(
    b: Bench, shares: list[float], sizes: list[int], *, size: int = 64, repeats: int = 100, seed: int = 0
) -> pd.DataFrame:
    """Bias, spread and cosine of every estimator: over shares of noise at N = size, and over N at shares 0 and 1.

    Relative to the length of the exact gradient. bias: of the mean estimate, its own sampling error taken off; std:
    root of the summed variances of one estimate; cosine: mean over single estimates, and that of their mean. All
    estimators of a row's setting see the same data and, where their samples have the same law, the same samples.
    """
    settings = list(dict.fromkeys([(u, size) for u in shares] + [(u, n) for u in (0.0, 1.0) for n in sizes]))
    length, result = b.gradient.norm(), []
    for name, method in ESTIMATORS.items():
        for share, n in settings:
            generator = torch.Generator().manual_seed(seed)
            g = estimates(b, method, share, n, repeats, generator)
            mean, variance = g.mean(0), g.var(0).sum()
            bias = ((mean - b.gradient).square().sum() - variance / repeats).clamp_min(0).sqrt()
            cosine = torch.cosine_similarity(g, b.gradient[None], dim=1)
            result.append(
                {
                    "estimator": name,
                    "uniform_share": share,
                    "n_samples": n,
                    "bias": float(bias / length),
                    "std": float(variance.sqrt() / length),
                    "cosine": float(cosine.mean()),
                    "cosine_of_mean": float(torch.cosine_similarity(mean, b.gradient, dim=0)),
                }
            )
    return pd.DataFrame(result)
