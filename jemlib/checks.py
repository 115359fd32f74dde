"""Equations (1) to (15), each measured against its exact counterpart. `equations.py` has the others and the table.

Every check is float64, returns an error that is 0 when the equation holds, and states the error that it may have.
Random checks are given tolerances of several standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jemlib import exact, nets, objectives
from jemlib.energy import JEM, energy_from_logits
from jemlib.exact import Space
from jemlib.objectives import METHODS
from jemlib.sampler import polynomial_decay, sgld


class Check(NamedTuple):
    """One quantity of an equation: how far from exact it is, and how far it may be."""

    equation: str
    quantity: str
    error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance  # False for nan


class Setup(NamedTuple):
    """A small float64 model on a grid, with its logits there, and a batch of labelled data."""

    model: JEM
    space: Space
    logits: Tensor
    x: Tensor
    y: Tensor
    generator: torch.Generator


def setup(seed: int = 0, n: int = 24, n_classes: int = 3) -> Setup:
    """A random multi-layer perceptron with energies that span several nats, on an n x n grid."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = JEM(nets.mlp(n_classes, width=12, input_scale=4.0)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    generator = torch.Generator().manual_seed(seed)
    space = Space.grid(n)
    with torch.no_grad():
        logits = model.logits(space.points)
    x = torch.rand(32, 2, dtype=torch.float64, generator=generator) * 2 - 1
    return Setup(model, space, logits, x, torch.arange(32) % n_classes, generator)


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def parameter_gradient(model: JEM, loss: Tensor) -> Tensor:
    """The gradient of a scalar with respect to all parameters, as one vector."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


# --- densities and likelihood: Equations (1) to (4) ---------------------------------------------------------


def densities(s: Setup) -> Iterator[Check]:
    """Normalization, and the marginal as a sum over labels."""
    mass, joint = s.space.log_mass, exact.log_joint(s.logits, s.space.log_mass)
    by_energy = -energy_from_logits(s.logits) - exact.log_z(s.logits, mass)
    yield Check("(1)", "integral of exp(-E(x)) / Z", abs(float((by_energy + mass).exp().sum()) - 1), 1e-12)
    yield Check(
        "(2)",
        "sum and integral of exp(-E(x, y)) / Z",
        abs(float(exact.log_labels(s.logits, mass).exp().sum()) - 1),
        1e-12,
    )
    yield Check("(2)", "p(x) = sum over y of p(x, y)", gap(by_energy.exp(), joint.exp().sum(1)), 1e-12)


def likelihood_gradients(s: Setup) -> Iterator[Check]:
    """The contrastive gradient with exact expectations against autograd through the exact log-likelihood."""
    mass = s.space.log_mass
    f_pos, f = s.model.logits(s.x), s.model.logits(s.space.points)
    p = (exact.log_joint(f, mass) + mass[:, None]).exp().detach()
    log_p = -energy_from_logits(f_pos) - exact.log_z(f, mass)
    whole = parameter_gradient(s.model, log_p.mean())
    f_pos, f = s.model.logits(s.x), s.model.logits(s.space.points)
    parts = -energy_from_logits(f_pos).mean() + (p.sum(1) * energy_from_logits(f)).sum()
    yield Check(
        "(3)",
        "gradient of log p(x): contrastive against autograd",
        relative(parameter_gradient(s.model, parts), whole),
        1e-6,
    )

    f_pos, f = s.model.logits(s.x), s.model.logits(s.space.points)
    whole = parameter_gradient(s.model, -exact.nll(f_pos, s.y, f, mass))
    f_pos, f = s.model.logits(s.x), s.model.logits(s.space.points)
    parts = -energy_from_logits(f_pos, s.y).mean() - (p * f).sum()
    yield Check(
        "(4)",
        "gradient of log p(x, y): contrastive against autograd",
        relative(parameter_gradient(s.model, parts), whole),
        1e-6,
    )

    weight, h = s.model.backbone[1].weight, 1e-5  # a central difference owes nothing to autograd
    with torch.no_grad():
        values = []
        for shift in (h, -2 * h, h):
            weight[0, 0] += shift
            values.append(-exact.nll(s.model.logits(s.x), s.y, s.model.logits(s.space.points), mass))
    slope = (values[0] - values[1]) / (2 * h)
    yield Check("(4)", "autograd against a central difference", float((slope - whole[0]).abs() / whole.norm()), 1e-6)


# --- the sampler: Equation (5) ------------------------------------------------------------------------------


class Mixture:
    """Energy of a mixture of isotropic Gaussians of one width; labels choose a component."""

    def __init__(self, centres: list[list[float]], shares: list[float], width: float):
        self.centres = torch.tensor(centres, dtype=torch.float64)
        self.shares, self.width = torch.tensor(shares, dtype=torch.float64), width

    def energy(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """-log of the density up to a constant, as (B,); of component y (B,) where labels are given."""
        logits = self.shares.log() - (x[:, None] - self.centres).square().sum(-1) / (2 * self.width**2)
        return energy_from_logits(logits, y)


class Flat:
    """An energy of 0 everywhere, with a gradient of 0."""

    def energy(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Zeros (B,) that depend on x (B, D)."""
        return 0 * x.sum(1)


def langevin(s: Setup) -> Iterator[Check]:
    """SGLD with a decaying step against known moments; no noise; no gradient; labels."""
    n, normal = 3000, torch.randn(3000, 2, dtype=torch.float64, generator=s.generator)
    decay = {"n_steps": 200, "step_size": polynomial_decay(1.0, 5.0, 0.6), "generator": s.generator}
    one = Mixture([[0.5, -0.3]], [1.0], 0.5)
    x, _ = sgld(one, normal, **decay)
    yield Check("(5)", "mean of a Gaussian", gap(x.mean(0), one.centres[0]), 5 * 0.5 / math.sqrt(n))
    yield Check(
        "(5)", "variance of a Gaussian, relative", gap(x.var(0) / 0.25, torch.ones(2)), 5 * math.sqrt(2 / n) + 0.04
    )
    two = Mixture([[-0.9, 0.0], [0.9, 0.0]], [0.3, 0.7], 0.6)
    x, _ = sgld(two, 2 * normal, **decay)
    mean = two.shares @ two.centres
    yield Check("(5)", "mean of a mixture", gap(x.mean(0), mean), 0.08)
    yield Check(
        "(5)",
        "second moments of a mixture, relative",
        gap(x.square().mean(0) / torch.tensor([1.17, 0.36]), torch.ones(2)),
        0.12,
    )
    label = torch.arange(n) % 2
    x, _ = sgld(two, 2 * normal, label, **decay)
    means = torch.stack([x[label == k].mean(0) for k in (0, 1)])
    yield Check("(5)", "mean of p(x given y), chains with labels", gap(means, two.centres), 0.08)

    _, health = sgld(s.model, s.x, n_steps=50, step_size=1e-4, temperature=0.0, generator=s.generator)
    yield Check("(5)", "share of uphill steps without noise", float(health.uphill_share), 0.0)
    x, _ = sgld(Flat(), torch.zeros(20_000, 2, dtype=torch.float64), n_steps=5, step_size=0.01, generator=s.generator)
    yield Check(
        "(5)", "variance of pure noise, relative", gap(x.var(0) / 0.05, torch.ones(2)), 5 * math.sqrt(2 / 20_000)
    )


# --- the classifier: Equations (6) to (11) ------------------------------------------------------------------


def classifier(s: Setup) -> Iterator[Check]:
    """Cross-entropy, softmax, its free constant, and the posterior from energies."""
    f = s.model.logits(s.x).detach()
    target = F.one_hot(s.y, f.shape[1]).double()
    by_hand = -(target * (f.exp() / f.exp().sum(1, keepdim=True)).log()).sum(1).mean()
    yield Check("(6), (7)", "cross-entropy, written out", gap(objectives.cross_entropy(f, s.y), by_hand), 1e-12)
    # odds of 2 : 3 : 5 give the labels 0 and 2 the probabilities 1/5 and 1/2
    odds = torch.tensor([[2.0, 3.0, 5.0]] * 2, dtype=torch.float64).log()
    known = abs(float(objectives.cross_entropy(odds, torch.tensor([0, 2]))) - (math.log(5) + math.log(2)) / 2)
    yield Check("(6), (7)", "cross-entropy of known odds", known, 1e-12)
    yield Check("(8)", "softmax of logits sums to 1", gap(f.softmax(1).sum(1), torch.ones(len(f))), 1e-12)
    c = 10 * torch.randn(len(f), 1, dtype=torch.float64, generator=s.generator)
    yield Check("(9), (10)", "softmax after adding c(x)", gap((f + c).softmax(1), f.softmax(1)), 1e-12)
    energies = torch.stack([s.model.energy(s.x, torch.full_like(s.y, k)) for k in range(f.shape[1])], dim=1)
    posterior = (s.model.energy(s.x)[:, None] - energies).exp().detach()
    yield Check("(11)", "p(y given x) from energies against softmax", gap(posterior, f.softmax(1)), 1e-12)


# --- mutual information: Equations (12) to (15) -------------------------------------------------------------


def information(s: Setup) -> Iterator[Check]:
    """Three forms of MI, its limits, its estimate on samples, its weight, and the decomposition of the objective."""
    mass = s.space.log_mass
    forms = torch.stack(list(exact.mutual_information(s.logits, mass).values()))
    yield Check("(12)-(14)", "three forms of I(X; Y)", float(forms.max() - forms.min()), 1e-10)
    column = s.logits[:, :1]
    apart = column + torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64)
    yield Check("(12)-(14)", "independent labels: 0", abs(float(exact.mutual_information(apart, mass)["kl"])), 1e-10)
    label = torch.arange(len(column)) % 3
    certain = torch.where(F.one_hot(label, 3).bool(), 0.0, -1e3).double()
    yield Check(
        "(12)-(14)",
        "certain balanced labels: log K",
        abs(float(exact.mutual_information(certain, mass)["kl"]) - math.log(3)),
        1e-10,
    )

    n = 20_000
    picked = s.logits[exact.draw(exact.log_marginal(s.logits, mass), mass, n, s.generator)]
    error = abs(float(objectives.mutual_information(picked) - forms[0]))
    yield Check("(13), A.3", "I(X; Y) on samples of the model", error, 5 * math.log(3) / math.sqrt(n))
    f_pos = s.model.logits(s.x).detach()
    with_mi, _ = objectives.loss(METHODS["st_jem_mi"], f_pos, s.y, picked[:64])
    without, _ = objectives.loss(METHODS["st_jem"], f_pos, s.y, picked[:64])
    term = METHODS["st_jem_mi"].mi_weight * objectives.mutual_information(picked[:64])
    yield Check("(13), A.3", "the term's weight in the loss", gap(without - with_mi, term), 1e-12)

    joint = exact.log_joint(s.logits, mass)
    left = s.logits.log_softmax(1) + exact.log_conditional(s.logits, mass)
    right = joint + joint - exact.log_marginal(s.logits, mass)[:, None] - exact.log_labels(s.logits, mass)
    yield Check("(15)", "log p(y given x) + log p(x given y)", gap(left, right), 1e-10)
