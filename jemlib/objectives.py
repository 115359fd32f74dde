"""Losses and gradient estimators, as pure functions of logits and energies: no model and no sampler in here.

Every loss is minimised, and its gradient is minus the estimator that the named equation gives. `f` stands for
logits, f(x)_y = -E(x, y). A method is a row of `METHODS`: data, not code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from jemlib.energy import energy_from_logits

ANCHORS = ("none", "own", "batch")
MIN_EXPONENT = 1e-3  #: of tempered weights; below it the normalizer's logarithm is rounding alone in 32 bits


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Mean of -log p(y given x) over a batch; logits (B, K), y (B,). Equations (6), (7) and (11)."""
    return F.cross_entropy(logits, y)


def contrastive(energy_pos: Tensor, energy_neg: Tensor) -> Tensor:
    """Mean energy of data (B,) minus mean energy of samples (M,): the plain average over samples.

    Its gradient is the Monte Carlo form of Equations (3), (4) and (17), by which energies are given: E(x), E(x, y).
    The value is no likelihood; it falls without bound where the samples do not follow the model.
    """
    return energy_pos.mean() - energy_neg.mean()


def candidates(f_pos: Tensor, f_neg: Tensor, y: Tensor, anchor: str) -> Tensor:
    """The terms of each datum's denominator, as (B, n): f(x^j)_{y_i} for datum i and candidate j.

    f_pos (B, K): logits of data; f_neg (M, K): of samples; y (B,). Candidates are the samples (anchor="none"), the
    datum itself and the samples ("own"), or the whole mini-batch and the samples ("batch"). Samples come last.
    """
    samples = f_neg[:, y].T
    if anchor == "none":
        return samples
    if anchor == "own":
        return torch.cat([f_pos.gather(1, y[:, None]), samples], dim=1)
    if anchor == "batch":
        return torch.cat([f_pos[:, y].T, samples], dim=1)
    raise ValueError(f"anchor must be one of {', '.join(ANCHORS)}, got {anchor!r}")


def negative_phase(f: Tensor, exponent: float = 1.0) -> Tensor:
    """What is pushed down: log-mean-exp of `exponent` * f, divided by `exponent`, over the last axis of f (B, n).

    Its gradient is sum_j w_j grad f_j with w = softmax(exponent * f). An exponent of 1 gives the self-normalized
    importance weights of Equations (19) and (20), 0 gives the plain average of Equation (17), a value in between
    tempers the weights.
    """
    _check_exponent(exponent)
    if exponent == 0:
        return f.mean(-1)
    return (torch.logsumexp(exponent * f, dim=-1) - math.log(f.shape[-1])) / exponent


def _check_exponent(exponent: float) -> None:
    if not (exponent == 0 or MIN_EXPONENT <= exponent <= 1):
        raise ValueError(f"exponent must be 0 or lie in [{MIN_EXPONENT:g}, 1], got {exponent}")


def importance_weighted(
    f_pos: Tensor, f_neg: Tensor, y: Tensor, *, anchor: str = "batch", exponent: float = 1.0
) -> Tensor:
    """Mean of -log p(x given y), its normalizer estimated by weighted candidates. Equations (17), (19) and (20).

    f_pos (B, K), f_neg (M, K), y (B,). With the anchor the value is at least -log n, n candidates: it is a
    cross-entropy that picks the datum out of its candidates.
    """
    rows, back = _distinct(f_pos, y, anchor)
    phase = negative_phase(candidates(f_pos, f_neg, rows, anchor), exponent)[back]
    return (phase - f_pos.gather(1, y[:, None])[:, 0]).mean()


def _distinct(f_pos: Tensor, y: Tensor, anchor: str) -> tuple[Tensor, Tensor | slice]:
    """Labels whose denominators differ, and where each datum finds its own among them.

    Without the own anchor a denominator depends on the label alone: K rows in the place of B.
    """
    return (y, slice(None)) if anchor == "own" else (torch.arange(f_pos.shape[1], device=y.device), y)


def effective_samples(f: Tensor, exponent: float = 1.0) -> Tensor:
    """Effective number 1 / sum_j w_j^2 of importance samples, per row of f (B, n) -> (B,), between 1 and n."""
    return (-torch.logsumexp(2 * F.log_softmax(exponent * f, dim=-1), dim=-1)).exp()


def mutual_information(logits: Tensor) -> Tensor:
    """I(X; Y) = H(mean posterior) - mean H(posterior) over a batch of logits (B, K), in nats. Equation (14).

    On samples of the model this estimates Equation (12); on data, the term that Equation (15) adds.
    """
    log_posterior = F.log_softmax(logits, dim=1)
    log_marginal = torch.logsumexp(log_posterior, dim=0) - math.log(len(logits))
    return (log_posterior.exp() * (log_posterior - log_marginal)).sum(1).mean()


def energy_l2(energy_pos: Tensor, energy_neg: Tensor) -> Tensor:
    """Mean squared energy of data plus that of samples: the regularizer of Du & Mordatch (2019)."""
    return energy_pos.square().mean() + energy_neg.square().mean()


@dataclass(frozen=True)
class Method:
    """One row of the method table: which terms, which estimator, which chains.

    generative: "none"; "x" for -log p(x) by plain average; "xy" for -log p(x, y) by plain average; "x|y" for
    -log p(x given y) by importance weights with `anchor` and `exponent`.
    """

    classify: float = 1.0  #: weight of -log p(y given x)
    generative: str = "none"
    anchor: str = "none"
    exponent: float = 1.0
    mi_weight: float = 0.0  #: weight of the mutual information, maximised
    mi_on: str = "samples"  #: the logits that it is taken on: "samples" or "data"
    energy_l2: float = 0.0  #: weight of the squared energies

    def __post_init__(self):
        if self.generative not in ("none", "x", "xy", "x|y"):
            raise ValueError(f"generative must be none, x, xy or x|y, got {self.generative!r}")
        if self.anchor not in ANCHORS:
            raise ValueError(f"anchor must be one of {', '.join(ANCHORS)}, got {self.anchor!r}")
        _check_exponent(self.exponent)
        if self.mi_on not in ("samples", "data"):
            raise ValueError(f"mi_on must be samples or data, got {self.mi_on!r}")

    @property
    def samples(self) -> bool:
        """Whether the method needs chains at all."""
        return self.generative != "none"

    @property
    def conditional(self) -> bool:
        """Whether its chains are drawn from p(x given y), each with a label, rather than from p(x)."""
        return self.generative in ("xy", "x|y")


_ST_JEM = Method(generative="x|y", anchor="batch")
METHODS: dict[str, Method] = {
    "softmax": Method(),
    "jem": Method(generative="x"),
    "jem_joint": Method(classify=0.0, generative="xy"),
    "st_jem": _ST_JEM,
    "st_jem_own": replace(_ST_JEM, anchor="own"),
    "st_jem_none": replace(_ST_JEM, anchor="none"),
    # Equation (17) in the place of (19), everything else as in st_jem: what the weights alone change
    "st_jem_plain": Method(generative="xy"),
    "st_jem_mi": replace(_ST_JEM, mi_weight=0.1),
}


def method(name: str) -> Method:
    """The method of that name; a ValueError lists the names there are."""
    if name not in METHODS:
        raise ValueError(f"no method is called {name!r}; there are {', '.join(METHODS)}")
    return METHODS[name]


def loss(
    method: Method,
    f_pos: Tensor,
    y_pos: Tensor,
    f_neg: Tensor | None = None,
    y_neg: Tensor | None = None,
    f_class: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a method on logits of data (B, K) with labels (B,), and of samples (M, K) with labels (M,) or None.

    f_class: logits (B, K) that the classifier's term takes in the place of f_pos: those of augmented data.
    Returns (loss, metrics); metrics are detached 0-dimensional tensors: one entry a term, the mean energies E(x)
    of data and samples and their gap, and the effective number of importance samples where weights are used.
    """
    total = f_pos.new_zeros(())
    metrics: dict[str, Tensor] = {}

    def add(name: str, weight: float, term: Tensor) -> None:
        nonlocal total
        total = total + weight * term
        metrics[name] = term.detach()

    if method.classify:
        add("nll", method.classify, cross_entropy(f_pos if f_class is None else f_class, y_pos))
    if method.samples:
        e_pos, e_neg = energy_from_logits(f_pos), energy_from_logits(f_neg)
        if method.generative == "x":
            add("generative", 1.0, contrastive(e_pos, e_neg))
        elif method.generative == "xy":
            joint_neg = energy_from_logits(f_neg, y_neg)
            add("generative", 1.0, contrastive(energy_from_logits(f_pos, y_pos), joint_neg))
        else:
            options = {"anchor": method.anchor, "exponent": method.exponent}
            add("generative", 1.0, importance_weighted(f_pos, f_neg, y_pos, **options))
            with torch.no_grad():
                rows, back = _distinct(f_pos, y_pos, method.anchor)
                weights = candidates(f_pos, f_neg, rows, method.anchor)
                metrics["effective_samples"] = effective_samples(weights, method.exponent)[back].mean()
        if method.energy_l2:
            add("energy_l2", method.energy_l2, energy_l2(e_pos, e_neg))
        metrics["energy_data"] = e_pos.detach().mean()
        metrics["energy_samples"] = e_neg.detach().mean()
        metrics["energy_gap"] = metrics["energy_samples"] - metrics["energy_data"]
    if method.mi_weight:
        add("mutual_information", -method.mi_weight, mutual_information(f_neg if method.mi_on == "samples" else f_pos))
    return total, metrics
