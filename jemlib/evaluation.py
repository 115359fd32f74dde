"""What a trained model is worth: classification, and its samples as an independent classifier sees them.

Nothing here adds input noise, touches a global random stream or leaves a model changed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from jemlib.config import TrainConfig, sampler_options
from jemlib.data import Labelled
from jemlib.energy import JEM
from jemlib.objectives import cross_entropy
from jemlib.sampler import SGLDHealth, frozen, sgld, uniform


@torch.no_grad()
def predict(model: nn.Module, x: Tensor, batch: int = 1000) -> Tensor:
    """Logits (N, K) of inputs (N, ...) in eval mode, on the CPU."""
    device = next(model.parameters()).device
    with frozen(model):
        return torch.cat([model(part.to(device)).cpu() for part in x.split(batch)])


def classification(model: JEM, data: Labelled) -> dict[str, float]:
    """Accuracy (a share) and mean negative log-likelihood of p(y given x) (nats) on labelled data."""
    logits, y = predict(model, data.x), data.y.cpu()
    return {"accuracy": (logits.argmax(1) == y).double().mean().item(), "nll": cross_entropy(logits, y).item()}


def fresh_chains(
    model: JEM, config: TrainConfig, y: Tensor, shape: tuple[int, ...], *, n_steps: int, seed: int, batch: int = 250
) -> tuple[Tensor, SGLDHealth]:
    """Chains of p(x given y) from uniform noise, by the sampler that the model was trained with.

    y: (N,) labels; shape: of one input; n_steps: SGLD steps of each chain. Returns samples (N, *shape) on the CPU,
    and the health of the last batch of chains.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    options = sampler_options(config) | {"n_steps": n_steps, "generator": generator}
    parts = []
    for labels in y.to(device).split(batch):
        start = uniform((len(labels), *shape), -1.0, 1.0, generator=generator, device=device)
        samples, health = sgld(model, start, labels, **options)
        parts.append(samples.cpu())
    return torch.cat(parts), health


def class_agreement(judge: JEM, x: Tensor, y: Tensor) -> float:
    """Share of class-conditional samples (N, ...) that an independent classifier gives the label (N,) asked for."""
    return (predict(judge, x).argmax(1) == y.cpu()).double().mean().item()


@torch.no_grad()
def features(judge: JEM, x: Tensor, batch: int = 1000) -> Tensor:
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
    """Class agreement and Frechet distance of labelled samples to reference features (M, F), with their number."""
    found = features(judge, samples.x)
    return {
        "class_agreement": class_agreement(judge, samples.x, samples.y),
        "frechet": frechet_distance(found, reference),
        "n_frechet": len(found),
    }
