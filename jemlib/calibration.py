"""Calibration: whether a classifier's confidence is its accuracy, and the one number that mends it.

Everything is computed in float64. Confidence is the probability of the predicted class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar
from torch import Tensor

from jemlib.evaluation import predict
from jemlib.trained import Trained

MAX_TEMPERATURE = 1e3  #: temperatures are sought between this and its inverse


def probabilities(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """p(y given x) (N, K) float64 of logits (N, K) divided by a temperature; ValueError for none or non-finite ones."""
    if logits.ndim != 2 or not len(logits) or not bool(torch.isfinite(logits).all()):
        raise ValueError(f"calibration needs finite logits (N, K) with N > 0, not {tuple(logits.shape)} such as given")
    return (logits.double() / temperature).softmax(1)


def nll(logits: Tensor, y: Tensor, temperature: float = 1.0) -> float:
    """Mean of -log p(y given x), nats."""
    return float(torch.nn.functional.cross_entropy(logits.double() / temperature, y))


def brier(p: Tensor, y: Tensor) -> float:
    """Brier score in [0, 2]: the mean over data of sum_k (p_k - [k = y])^2, for p (N, K) and labels (N,)."""
    return float((p - torch.nn.functional.one_hot(y, p.shape[1])).square().sum(1).mean())


def reliability(confidence: ArrayLike, correct: ArrayLike, n_bins: int = 15, adaptive: bool = False) -> pd.DataFrame:
    """Reliability data, one row a bin that is not empty: low, high, confidence, accuracy, count.

    confidence: (N,) in [0, 1]; correct: (N,) of 0 and 1. Equal-width bins are [i/n, (i+1)/n), the last one closed.
    adaptive: bins of equal count instead; equal confidences stay together, so that the order of data plays no part.
    Raises ValueError where there are no data or a confidence lies outside [0, 1].
    """
    c, hit = np.asarray(confidence, float), np.asarray(correct, float)
    if c.ndim != 1 or c.shape != hit.shape or not len(c):
        raise ValueError(f"reliability needs as many outcomes as confidences and at least one: {hit.shape}, {c.shape}")
    if not (np.isfinite(c).all() and c.min() >= 0 and c.max() <= 1):
        raise ValueError("confidences must lie in [0, 1]")
    if n_bins < 1:
        raise ValueError(f"reliability needs at least one bin, not {n_bins}")
    edges = np.arange(n_bins + 1) / n_bins
    if adaptive:
        rank = np.searchsorted(np.sort(c), c)  # the number of smaller confidences
        index = rank * n_bins // len(c)
    else:
        index = np.searchsorted(edges[1:-1], c, side="right")
    frame = pd.DataFrame({"bin": index, "confidence": c, "accuracy": hit, "low": c, "high": c, "count": 1})
    how = {"low": "min", "high": "max", "confidence": "mean", "accuracy": "mean", "count": "sum"}
    bins = frame.groupby("bin").agg(how)
    if not adaptive:
        bins["low"], bins["high"] = edges[bins.index], edges[bins.index + 1]
    return bins.reset_index(drop=True)


def ece(confidence: ArrayLike, correct: ArrayLike, n_bins: int = 15, adaptive: bool = False) -> float:
    """Expected calibration error: sum over bins of count/N |accuracy - confidence|. Arguments as of `reliability`."""
    bins = reliability(confidence, correct, n_bins, adaptive)
    gaps = (bins["accuracy"] - bins["confidence"]).abs()
    return float((gaps * bins["count"]).sum() / bins["count"].sum())


def fit_temperature(logits: Tensor, y: Tensor) -> float:
    """The temperature that minimizes the NLL of logits (N, K) / T on held-out labels (N,).

    The NLL is convex in 1/T and so has one minimum in log T. It lies at the end of the range [1/1000, 1000] where
    every datum is classified right (T -> 0) or the logits say nothing (T -> infinity).
    """
    probabilities(logits)  # refuses what cannot be scaled
    bound = math.log(MAX_TEMPERATURE)
    found = minimize_scalar(
        lambda log_t: nll(logits, y, math.exp(log_t)), bounds=(-bound, bound), method="bounded", options={"xatol": 1e-6}
    )
    return math.exp(found.x)


def metrics(logits: Tensor, y: Tensor, temperature: float = 1.0, n_bins: int = 15) -> dict[str, float]:
    """temperature, accuracy, nll (nats), brier, ece, ece_adaptive and n of logits (N, K) / T for labels (N,)."""
    p = probabilities(logits, temperature)
    confidence, predicted = p.max(1)
    correct = predicted == y
    return {
        "temperature": temperature,
        "accuracy": float(correct.double().mean()),
        "nll": nll(logits, y, temperature),
        "brier": brier(p, y),
        "ece": ece(confidence, correct, n_bins),
        "ece_adaptive": ece(confidence, correct, n_bins, adaptive=True),
        "n": len(y),
    }


def table(trained: Sequence[Trained], n_bins: int = 15) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Calibration on test data, as trained and with the temperature fitted on validation data.

    Returns (one row a model and scaling: columns of `metrics` beside the model's; reliability data of equal-width
    bins: columns of `reliability` with model and scaling).
    """
    rows, curves = [], []
    for one in trained:
        val, test = (predict(one.model, part.x, batch=100) for part in (one.dataset.val, one.dataset.test))
        y_val, y = one.dataset.val.y, one.dataset.test.y
        for scaling, temperature in {"none": 1.0, "temperature": fit_temperature(val, y_val)}.items():
            measured = metrics(test, y, temperature, n_bins)
            rows.append(one.row() | {"scaling": scaling} | measured | {"n_val": len(y_val), "run": one.run})
            confidence, predicted = probabilities(test, temperature).max(1)
            curves.append(reliability(confidence, predicted == y, n_bins).assign(model=one.name, scaling=scaling))
    return pd.DataFrame(rows), pd.concat(curves, ignore_index=True)
