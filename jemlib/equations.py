"""The equation map: Equations (16) to (21), measured like those in `checks.py`, and the table of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pandas as pd
import torch

from jemlib import checks, exact, objectives
from jemlib.checks import Check, Setup, gap, parameter_gradient, relative
from jemlib.estimators import jacobian
from jemlib.exact import Space
from jemlib.objectives import METHODS


def conditional_likelihood(s: Setup) -> Iterator[Check]:
    """The gradient of log p(x given y): exact, in expectation, and by exact samples."""
    mass, k = s.space.log_mass, 1
    f = s.model.logits(s.space.points)
    log_p = exact.log_conditional(f, mass)
    integrals = (log_p + mass[:, None]).exp().sum(0).detach()
    yield Check("(16)", "integral of p(x given y)", gap(integrals, torch.ones(3)), 1e-12)
    datum = 100
    whole = parameter_gradient(s.model, log_p[datum, k])
    rows = jacobian(s.model, s.space.points, k)
    weights = (log_p[:, k] + mass).exp().detach()
    yield Check(
        "(17)", "expectation under p(x given y) against autograd", relative(rows[datum] - weights @ rows, whole), 1e-10
    )
    n = 100_000
    index = exact.draw(log_p[:, k].detach(), mass, n, s.generator)
    estimate = rows[datum] - (torch.bincount(index, minlength=len(rows)).double() / n) @ rows
    spread = (weights @ (rows - weights @ rows).square()).sum().sqrt() / math.sqrt(n)
    yield Check(
        "(17)", "plain average over exact samples, in standard errors", float((estimate - whole).norm() / spread), 4.0
    )


def importance_sampling(s: Setup) -> Iterator[Check]:
    """Self-normalized importance sampling from uniform proposals: its limit and its rate."""
    mass, k = s.space.log_mass, 1
    f, rows = s.logits[:, k], jacobian(s.model, s.space.points, k)
    target = (f + mass).softmax(0) @ rows
    yield Check(
        "(18)",
        "uniform proposals with weights p / q against the exact expectation",
        relative((f.exp() / f.exp().sum()) @ rows, target),
        1e-10,
    )
    sizes, errors = [2**i for i in range(7, 16)], []
    for n in sizes:
        squares = []
        for _ in range(40):
            index = torch.randint(len(f), (n,), generator=s.generator)
            values = f[index].requires_grad_()
            (weights,) = torch.autograd.grad(objectives.negative_phase(values), values)
            by_state = torch.zeros_like(f).index_add_(0, index, weights)
            squares.append((by_state @ rows - target).square().sum())
        errors.append(float(torch.stack(squares).mean().sqrt()))
    log_n, log_error = torch.tensor(sizes).double().log(), torch.tensor(errors).double().log()
    slope = float(torch.cov(torch.stack([log_n, log_error]))[0, 1] / log_n.var())
    yield Check("(18), (19)", f"error falls as N^{slope:.3f}: distance from -1/2", abs(slope + 0.5), 0.05)
    yield Check("(19)", f"relative error at N = {sizes[-1]}", errors[-1] / float(target.norm()), 0.02)


def weights(s: Setup) -> Iterator[Check]:
    """What the weights of Equation (20) do."""
    f_pos, f_neg = s.model.logits(s.x).detach(), s.logits[:40].clone().requires_grad_()
    (w,) = torch.autograd.grad(objectives.negative_phase(f_neg[:, 0]), f_neg)
    yield Check("(20)", "weights sum to 1", abs(float(w.sum()) - 1), 1e-12)
    by_hand = f_neg[:, 0].detach().exp() / f_neg[:, 0].detach().exp().sum()
    yield Check("(20)", "weights, written out", gap(w[:, 0], by_hand), 1e-12)
    level = torch.zeros(40, dtype=torch.float64).requires_grad_()
    (w,) = torch.autograd.grad(objectives.negative_phase(level), level)
    yield Check("(20)", "equal weights are those of (17)", gap(w, torch.full_like(w, 1 / 40)), 1e-12)
    for anchor in ("own", "batch"):
        pos, far = f_pos.clone().requires_grad_(), (s.logits[:40] - 100).requires_grad_()
        loss = objectives.importance_weighted(pos[:1], far, s.y[:1], anchor=anchor)
        gradients = torch.autograd.grad(loss, (pos, far))
        largest = max(float(gradient.abs().max()) for gradient in gradients)
        yield Check("(20)", f"gradient with samples 100 nats away, anchor {anchor}", largest, 1e-12)


def optimum(s: Setup) -> Iterator[Check]:
    """Over-trained optimum on ten states: the same as maximum likelihood for data that occur equally often."""
    space, method = Space.states(10), replace(METHODS["st_jem_none"], classify=0.0)
    once = torch.full((10, 1), 0.1, dtype=torch.float64).log()
    found = exact.log_joint(exact.stationary(method, once, space.log_mass).logits, space.log_mass)
    yield Check(
        "(21)", "each datum once: KL to maximum likelihood", float(exact.kl(once, found, space.log_mass)), 1e-10
    )
    counts = torch.ones(10, 1, dtype=torch.float64)
    counts[3] = 4
    repeated = (counts / counts.sum()).log()
    found = exact.log_joint(exact.stationary(method, repeated, space.log_mass).logits, space.log_mass)
    root = exact.log_joint(repeated / 2, space.log_mass)
    yield Check("(21)", "a datum four times: KL to sqrt(p_data)", float(exact.kl(root, found, space.log_mass)), 1e-10)
    distance = float(exact.kl(repeated, found, space.log_mass))
    quantity = f"a datum four times: KL to maximum likelihood is {distance:.3f}; what is missing to 0.01"
    yield Check("(21)", quantity, max(0.0, 0.01 - distance), 0.0)


FAMILIES: tuple[Callable[[Setup], Iterator[Check]], ...] = (
    checks.densities,
    checks.likelihood_gradients,
    checks.langevin,
    checks.classifier,
    checks.information,
    conditional_likelihood,
    importance_sampling,
    weights,
    optimum,
)


def table(seed: int = 0) -> pd.DataFrame:
    """Every row of the equation map, in the paper's order: equation, quantity, error, tolerance, holds."""
    setup = checks.setup(seed)
    rows = [check for family in FAMILIES for check in family(setup)]
    return pd.DataFrame([{**check._asdict(), "holds": check.holds} for check in rows])


NEGATIVES: dict[str, objectives.Method] = {
    "plain average": METHODS["st_jem_plain"],
    "plain average of E(x)": METHODS["jem"],
    "weights": METHODS["st_jem_none"],
    "weights, own anchor": METHODS["st_jem_own"],
    "weights, whole batch": METHODS["st_jem"],
    "weights ^ 0.5, one label": replace(METHODS["st_jem_none"], exponent=0.5),
}


def fixed_points(
    n_states: int = 24, n_classes: int = 3, n_samples: float = 1e6, seed: int = 0
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Follow each update to where it comes to rest on random labelled states, and compare with the prediction.

    Returns (table, curves): a row per negatives and sampler with negatives, sampler, predicted, kl_to_prediction,
    kl_to_data (nats, joint densities), status, steps; and the same distributions of x, state by state. n_samples: per
    datum where its own anchor is one of the candidates.
    """
    generator = torch.Generator().manual_seed(seed)
    space = Space.states(n_states)
    many = torch.randn(n_states, n_classes, dtype=torch.float64, generator=generator)
    many = exact.log_conditional(1.5 * many, space.log_mass) - math.log(n_classes)
    many = many[many.logsumexp(1).argsort(descending=True)]
    rows, curves = [], []
    for (name, method), share in product(NEGATIVES.items(), (0.0, 1.0)):
        sampler = "uniform" if share else "perfect"
        log_data = many.logsumexp(1, keepdim=True) if 0 < method.exponent < 1 else many
        rest = exact.stationary(method, log_data, space.log_mass, share, n_samples=n_samples, limit=200)
        found = exact.log_joint(rest.logits, space.log_mass)
        expected = exact.predicted(method, log_data, space.log_mass, sampler)
        row = {"negatives": name, "sampler": sampler, "predicted": _formula(method, sampler)}
        row |= {"kl_to_prediction": math.nan, "kl_to_data": math.nan}
        if rest.status == "converged":
            row["kl_to_data"] = float(exact.kl(log_data, found, space.log_mass))
            if expected is not None:
                row["kl_to_prediction"] = abs(float(exact.kl(found, expected, space.log_mass)))
        rows.append(row | {"status": rest.status, "steps": rest.steps})
        curve = {"negatives": name, "sampler": sampler, "state": range(1, n_states + 1)}
        curve["p_data"] = log_data.logsumexp(1).exp().tolist()
        curve["measured"] = found.logsumexp(1).exp().tolist() if rest.status == "converged" else math.nan
        curve["predicted"] = math.nan if expected is None else expected.logsumexp(1).exp().tolist()
        curves.append(pd.DataFrame(curve))
    return pd.DataFrame(rows), pd.concat(curves, ignore_index=True)


def _formula(method: objectives.Method, sampler: str) -> str:
    if method.generative != "x|y":
        return "p_data" if sampler == "perfect" else "none: E grows without bound"
    if method.anchor == "batch":
        return "p_data / (p_data/2 + q/2), q " + ("= p" if sampler == "perfect" else "uniform")
    if method.exponent < 1:
        return f"p_data ^ {1 / (1 + method.exponent) if sampler == 'perfect' else 1 / method.exponent:.3g}"
    return "p_data / q, q = p: sqrt(p_data) for balanced labels" if sampler == "perfect" else "p_data"
