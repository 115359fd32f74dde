"""What a trained model is worth: classification, and its samples as an independent classifier sees them.

Nothing here adds input noise, touches a global random stream or leaves a model changed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from jemlib.chains import chain_runner
from jemlib.config import TrainConfig
from jemlib.data import Labelled
from jemlib.energy import JEM
from jemlib.objectives import cross_entropy
from jemlib.sampler import SGLDHealth, frozen, uniform
from jemlib.training import FitResult


@torch.no_grad()
def predict(model: nn.Module, x: Tensor, batch: int = 250) -> Tensor:
    """Logits (N, K) of inputs (N, ...) in eval mode, on the CPU."""
    device = next(model.parameters()).device
    with frozen(model):
        return torch.cat([model(part.to(device)).cpu() for part in x.split(batch)])


def classification(model: JEM, data: Labelled) -> dict[str, float]:
    """Accuracy (a share) and mean negative log-likelihood of p(y given x) (nats) on labelled data."""
    logits, y = predict(model, data.x), data.y.cpu()
    return {"accuracy": _share_right(logits, y), "nll": cross_entropy(logits, y).item()}


def _share_right(logits: Tensor, y: Tensor) -> float:
    """Share of logits (N, K) that are highest for the label (N,); those that are not finite are wrong."""
    return ((logits.argmax(1) == y) & logits.isfinite().all(1)).double().mean().item()


def fresh_chains(
    model: JEM, config: TrainConfig, y: Tensor, shape: tuple[int, ...], *, n_steps: int, seed: int, batch: int = 250
) -> tuple[Tensor, SGLDHealth]:
    """Chains of p(x given y) from uniform noise, by the sampler that the model was trained with.

    y: (N,) labels; shape: of one input; n_steps: SGLD steps of each chain. Returns samples (N, *shape) on the CPU,
    and the health of the last batch of chains.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    move = chain_runner(model, config, generator, n_steps=n_steps)
    parts = []
    for labels in y.to(device).split(batch):
        start = uniform((len(labels), *shape), -1.0, 1.0, generator=generator, device=device)
        samples, health = move(start, labels)
        parts.append(samples.cpu())
    return torch.cat(parts), health


def class_agreement(judge: JEM, x: Tensor, y: Tensor) -> float:
    """Share of class-conditional samples (N, ...) that an independent classifier gives the label (N,) asked for."""
    return _share_right(predict(judge, x), y.cpu())


@torch.no_grad()
def features(judge: JEM, x: Tensor, batch: int = 250) -> Tensor:
    """Inputs of the judge's last layer, (N, F) float64 on the CPU, for inputs (N, ...)."""
    return predict(judge.backbone[:-1], x, batch).double()


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """Frechet distance between Gaussians fitted to features a (N, F) and b (M, F).

    |mean_a - mean_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^1/2). Raises ValueError where N or M <= F, where a covariance
    is singular and the figure means little, and for features that are not finite.
    """
    for part in (a, b):
        if len(part) <= part.shape[1]:
            raise ValueError(f"a Frechet distance over {part.shape[1]} features needs more samples, not {len(part)}")
        if not torch.isfinite(part).all():
            raise ValueError("a Frechet distance needs finite features")
    a, b = a.double(), b.double()
    c_a, c_b = torch.cov(a.T).numpy(), torch.cov(b.T).numpy()
    # the product of two positive semi-definite matrices has real eigenvalues >= 0; rounding may stray from that
    root_trace = np.sqrt(np.linalg.eigvals(c_a @ c_b).real.clip(min=0)).sum()
    return float((a.mean(0) - b.mean(0)).square().sum()) + float(np.trace(c_a) + np.trace(c_b) - 2 * root_trace)


def samples_metrics(judge: JEM, samples: Labelled, reference: Tensor) -> dict[str, float]:
    """Class agreement and Frechet distance of labelled samples to reference features (M, F), with their number.

    The distance is nan, of 0 samples, where there are too few on either side to have one, or samples are not finite.
    """
    found = features(judge, samples.x)
    enough = min(len(found), len(reference)) > reference.shape[1] and bool(found.isfinite().all())
    return {
        "class_agreement": class_agreement(judge, samples.x, samples.y),
        "frechet": frechet_distance(found, reference) if enough else math.nan,
        "n_frechet": len(found) if enough else 0,
    }


def validation(data: Labelled) -> Callable[[JEM], dict[str, float]]:
    """What `fit` calls at its log points: accuracy and NLL on validation data, as val_accuracy and val_nll."""
    return functools.partial(_validate, data)


def _validate(data: Labelled, model: JEM) -> dict[str, float]:
    return {f"val_{name}": value for name, value in classification(model, data).items()}


def assess(
    result: FitResult, data: Labelled, judge: JEM, reference: Tensor, *, n_fresh: int, fresh_steps: int, seed: int
) -> tuple[dict[str, float], Labelled | None]:
    """One row of a method table: the classifier on `data`, and fresh class-conditional chains seen by the judge.

    reference: features of the judge for real images. Returns (row, samples); a method that has no sampler has no
    samples and nan in their columns. energy_gap is the mean over the last log_every iterations, nats.
    """
    last = result.history[-1]
    row = {
        "method": result.config.method,
        "seed": result.config.seed,
        "steps": result.config.n_iterations,
        **classification(result.model, data),
        "energy_data": last.get("energy_data", math.nan),
        "energy_gap": last.get("energy_gap", math.nan),
        "class_agreement": math.nan,
        "frechet": math.nan,
        "frechet_buffer": math.nan,
        "n_frechet": n_fresh,
        "status": result.status,
    }
    if result.buffer is None:
        return row | {"n_frechet": 0}, None
    y = torch.arange(n_fresh) % n_classes(result.model)
    shape = tuple(data.x.shape[1:])
    samples, _ = fresh_chains(result.model, result.config, y, shape, n_steps=fresh_steps, seed=seed)
    samples = Labelled(samples, y)
    row |= samples_metrics(judge, samples, reference)
    stored = features(judge, result.buffer.x[:n_fresh].cpu())
    if row["n_frechet"] and len(stored) > stored.shape[1] and bool(stored.isfinite().all()):
        row["frechet_buffer"] = frechet_distance(stored, reference)
    return row, samples


def n_classes(model: JEM) -> int:
    """Number of labels of a model, read off its last layer."""
    return model.backbone[-1].out_features


def stored_chains(result: FitResult) -> Labelled:
    """The buffer's chains with the label each was drawn for; chains of p(x) get the model's own label."""
    x, y = result.buffer.x.cpu(), result.buffer.y
    return Labelled(x, predict(result.model, x).argmax(1) if y is None else y.cpu())
