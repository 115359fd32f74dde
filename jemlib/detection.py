"""Out-of-distribution detection: scores of single inputs, and how well they rank two sets.

The positive class is *in-distribution*, and every score is higher for what looks more in-distribution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from torch import Tensor

from jemlib.energy import JEM
from jemlib.ood import NotAvailable
from jemlib.sampler import frozen
from jemlib.trained import Trained

#: score -> what it is
SCORES = {
    "log_px": "log p(x) + log Z = -E(x)",
    "max_prob": "max log p(y|x)",
    "neg_entropy": "-H(y|x)",
    "neg_grad_norm": "-|d log p(x)/dx|",
}


def scores(model: JEM, x: Tensor, names: Sequence[str] = tuple(SCORES), batch: int = 100) -> dict[str, Tensor]:
    """Scores (N,) float64 of inputs x (N, ...), on the CPU; nats, the gradient's norm in nats per unit of x.

    max_prob is the logarithm of max p(y given x), which ranks alike and does not round to 1 where p does. Each input
    is scored by itself, in eval mode. Raises ValueError for a name that is not in `SCORES`.
    """
    for name in names:
        if name not in SCORES:
            raise ValueError(f"no score is called {name!r}; there are {', '.join(SCORES)}")
    device = next(model.parameters()).device
    parts = []
    with frozen(model):
        for part in x.split(batch):
            part = part.detach().to(device, copy=True).requires_grad_("neg_grad_norm" in names)
            with torch.set_grad_enabled(part.requires_grad):
                logits = model.logits(part)
            found = {name: score(logits.detach().cpu().double()) for name, score in _OF_LOGITS.items() if name in names}
            if part.requires_grad:
                (gradient,) = torch.autograd.grad(logits.logsumexp(1).sum(), part)
                found["neg_grad_norm"] = -gradient.cpu().double().flatten(1).norm(dim=1)
            parts.append(found)
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def _log_probabilities(logits: Tensor) -> tuple[Tensor, Tensor]:
    """log p(y given x) sorted, the largest first, as (N, 1) and (N, K - 1).

    The largest is -log(1 + sum exp(f_i - f_max)), exact also where it is nearer to 0 than rounding around 1 allows.
    """
    top, *_ = ordered = logits.sort(1, descending=True).values.split([1, logits.shape[1] - 1], 1)
    largest = -(ordered[1] - top).logsumexp(1, keepdim=True).exp().log1p()
    return largest, ordered[1] - top + largest


def _max_log_probability(logits: Tensor) -> Tensor:
    return _log_probabilities(logits)[0].squeeze(1)


def _negative_entropy(logits: Tensor) -> Tensor:
    return torch.cat([log_p * log_p.exp() for log_p in _log_probabilities(logits)], 1).sum(1)


_OF_LOGITS = {
    "log_px": lambda logits: logits.logsumexp(1),
    "max_prob": _max_log_probability,
    "neg_entropy": _negative_entropy,
}


def rates(score_in: ArrayLike, score_out: ArrayLike) -> dict[str, float]:
    """How well a score tells in-distribution (positive) from OOD inputs: auroc, auroc_se, aupr, fpr95, n_in, n_out.

    score_in: (N,), score_out: (M,), higher for in-distribution; ranked as they are. fpr95 is the smallest share of
    OOD inputs that pass a threshold which at least 95% of the in-distribution inputs pass. aupr is the average
    precision; at random it is n_in / (n_in + n_out). auroc_se: standard error of auroc. Raises
    ValueError for an empty side or a score that is not finite.
    """
    sides = [np.asarray(side, dtype=np.float64).ravel() for side in (score_in, score_out)]
    n_in, n_out = map(len, sides)
    if not n_in or not n_out:
        raise ValueError(f"detection needs scores of both sides, not {n_in} in-distribution and {n_out} OOD scores")
    value = np.concatenate(sides)
    if not np.isfinite(value).all():
        raise ValueError(f"detection needs finite scores; {(~np.isfinite(value)).sum()} of {len(value)} are not")
    positive = np.repeat([1, 0], [n_in, n_out])
    false_positives, true_positives, _ = roc_curve(positive, value, drop_intermediate=False)
    auroc = float(roc_auc_score(positive, value))
    return {
        "auroc": auroc,
        "auroc_se": _standard_error(auroc, n_in, n_out),
        "aupr": float(average_precision_score(positive, value)),
        "fpr95": float(false_positives[true_positives >= 0.95].min()),
        "n_in": n_in,
        "n_out": n_out,
    }


def _standard_error(auroc: float, n_in: int, n_out: int) -> float:
    """Standard error of an AUROC by Hanley and McNeil (1982), for scores with exponential tails."""
    both_in, both_out = auroc / (2 - auroc), 2 * auroc**2 / (1 + auroc)
    variance = auroc * (1 - auroc) + (n_in - 1) * (both_in - auroc**2) + (n_out - 1) * (both_out - auroc**2)
    return math.sqrt(max(variance, 0.0) / (n_in * n_out))


def table(
    trained: Sequence[Trained], ood: Mapping[str, Mapping[str, Tensor | NotAvailable]], n: int
) -> tuple[pd.DataFrame, dict[str, dict[str, dict[str, Tensor]]]]:
    """Detection of OOD sets by every model and score.

    ood: data set -> its sets, as of `ood.ood_sets`; n: the number of test images on the in-distribution side, 0 for
    all. Returns (one row a model, set and score, with nan and the reason where a set is not available; model -> set
    -> score -> values, the test images under the data set's name).
    """
    rows, values = [], {}
    for one in trained:
        test = one.dataset.test.x[: n or None]
        found = values[one.name] = {one.dataset.name: scores(one.model, test)}
        found |= {name: scores(one.model, x) for name, x in ood[one.dataset.name].items() if isinstance(x, Tensor)}
        for name, x in ood[one.dataset.name].items():
            for score in SCORES:
                about = one.row() | {"in_dataset": one.dataset.name, "ood_dataset": name, "score": score}
                if isinstance(x, NotAvailable):
                    nothing = dict.fromkeys(("auroc", "auroc_se", "aupr", "fpr95"), math.nan)
                    nothing |= {"n_in": len(test), "n_out": 0}
                    rows.append(about | nothing | {"note": f"not available: {x.reason}", "run": one.run})
                else:
                    measured = rates(found[one.dataset.name][score], found[name][score])
                    rows.append(about | measured | {"note": "", "run": one.run})
    return pd.DataFrame(rows), values


def claims(calibrated: pd.DataFrame, detected: pd.DataFrame) -> pd.DataFrame:
    """What is said of joint models, held against these: in_dataset, claim, whether it holds, and the figures.

    calibrated, detected: as of `calibration.table` and `table`; st_jem and softmax, means over seeds. Of detection the
    sets are counted, since a mean over them rests on how many are noise. Diverged runs are left out, and so is a data
    set that lacks one of the two.
    """
    found = []
    for name, rows in detected[detected["status"] == "ok"].groupby("in_dataset", sort=False):
        if not {"softmax", "st_jem"} <= set(rows["method"]):
            continue
        here = calibrated[calibrated["model"].isin(rows["model"])]
        ece = here.groupby(["scaling", "method"])["ece"].mean()
        for scaling, said in {"none": "as trained", "temperature": "with a fitted temperature"}.items():
            ours, other = ece[scaling, "st_jem"], ece[scaling, "softmax"]
            figures = f"ECE {ours:.4f} against {other:.4f}"
            if scaling != "none":  # scaling may make it worse
                figures += f", and softmax as trained {ece['none', 'softmax']:.4f}"
            found.append((name, f"st_jem is better calibrated than softmax, {said}", ours < other, figures))
        for other in ("st_jem", "softmax"):
            claim = f"st_jem's log p(x) detects more sets better than {other}'s max p(y|x) than worse"
            found.append((name, claim, *_by_set(rows, ("log_px", "st_jem"), ("max_prob", other))))
    return pd.DataFrame(found, columns=["in_dataset", "claim", "holds", "figures"])


def _by_set(rows: pd.DataFrame, ours: tuple[str, str], theirs: tuple[str, str]) -> tuple[bool, str]:
    """Whether one (score, method) is better than another on more OOD sets than it is worse on, and the figures.

    Better or worse: by more than two standard errors of the difference, as of independent images.
    """
    known = rows.dropna(subset=["auroc"]).groupby(["score", "method", "ood_dataset"])
    found = known[["auroc", "auroc_se"]].mean()
    ours, theirs = found.loc[ours], found.loc[theirs]
    difference = ours["auroc"] - theirs["auroc"]
    clear = difference.abs() > 2 * (ours["auroc_se"] ** 2 + theirs["auroc_se"] ** 2) ** 0.5
    better, worse = difference.index[clear & (difference > 0)], difference.index[clear & (difference < 0)]
    figures = f"better on {len(better)} of {len(difference)} sets, worse on {len(worse)}"
    figures += f" ({', '.join(worse)})" if len(worse) else ""
    figures += f"; mean AUROC {ours['auroc'].mean():.3f} against {theirs['auroc'].mean():.3f}"
    return len(better) > len(worse), figures
