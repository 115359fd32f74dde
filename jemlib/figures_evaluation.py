"""Figures of calibration and out-of-distribution detection; each returns (figure, alt text)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator
from torch import Tensor

from jemlib.detection import SCORES

_COLORS = sns.color_palette("colorblind").as_hex()
_SCALINGS = {"none": ("as trained", _COLORS[3], "o", "-"), "temperature": ("temperature-scaled", _COLORS[0], "s", "--")}
_SCORE_LABELS = {
    "log_px": "log p(x) + const",
    "max_prob": "max p(y|x)",
    "neg_entropy": "−entropy of p(y|x)",
    "neg_grad_norm": "−|∇ log p(x)|",
}
_TINY = 1e-30
_FEW = 10
#: how a histogram shows a score: the label of the axis, and a strictly increasing map that spreads the values out
_SHOWN = {
    "log_px": ("log p(x) + const (nats)", lambda s: s),
    "max_prob": ("log odds of max p(y|x) (nats)", lambda s: s - np.log(np.maximum(-np.expm1(s), _TINY))),
    "neg_entropy": ("−log10 of the entropy (nats)", lambda s: -np.log10(np.maximum(-s, _TINY))),
    "neg_grad_norm": ("−log10 |∇ log p(x)|", lambda s: -np.log10(np.maximum(-s, _TINY))),
}
_SET_STYLES = [(_COLORS[1], "-"), (_COLORS[2], "--"), (_COLORS[4], "-."), (_COLORS[9], ":"), ("black", (0, (1, 1)))]


def reliability_diagrams(curves: pd.DataFrame, table: pd.DataFrame, title: str) -> tuple[Figure, str]:
    """Accuracy by confidence with the counts below, a column a model, before and after temperature scaling.

    curves, table: what `calibration.table` returns, for the models of one figure. Bins of fewer than 10 images are
    hollow and not joined to the line.
    """
    models = list(dict.fromkeys(curves["model"]))
    size = (2.3 * len(models) + 0.8, 4.6)
    layout = {"sharex": True, "sharey": "row", "squeeze": False, "height_ratios": [2, 1]}
    fig, axes = plt.subplots(2, len(models), figsize=size, **layout)
    said = []
    for (above, below), name in zip(axes.T, models, strict=True):
        above.plot([0, 1], [0, 1], color="0.5", lw=1)
        rows = table[table["model"] == name].set_index("scaling")
        for scaling, (label, color, marker, dashes) in _SCALINGS.items():
            bins = curves[(curves["model"] == name) & (curves["scaling"] == scaling)]
            style = {"color": color, "ls": dashes, "lw": 1.2, "label": label}
            enough = bins["count"] >= _FEW  # the accuracy of a handful of images is no point of a curve
            above.plot(bins["confidence"][enough], bins["accuracy"][enough], marker=marker, ms=4, **style)
            few = bins[~enough]
            above.plot(few["confidence"], few["accuracy"], marker, color=color, ms=4, mfc="none", mew=0.8)
            middle = (bins["low"] + bins["high"]) / 2
            below.plot(middle, bins["count"], marker=marker, ms=4, **style)
        ece = rows["ece"]
        above.set_title(f"{name}\nECE {ece['none']:.3f} → {ece['temperature']:.3f}", fontsize=9)
        below.set(xlabel="confidence", yscale="log", xlim=(0, 1.02))
        said.append(
            f"{name} {ece['none']:.3f} to {ece['temperature']:.3f}, T = {rows['temperature']['temperature']:.2f}"
        )
    axes[0, 0].set(ylabel="accuracy", ylim=(-0.02, 1.02))
    axes[1, 0].set(ylabel="count in bin")
    hollow = Line2D([], [], color="0.3", marker="o", ms=4, mfc="none", ls="", label=f"fewer than {_FEW} images")
    handles = [*axes[0, 0].get_legend_handles_labels()[0], hollow]
    fig.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    fig.suptitle(title, parse_math=False)
    return fig, f"{title}. Expected calibration error before and after scaling: {'; '.join(said)}."


def score_histograms(
    values: Mapping[str, Mapping[str, Mapping[str, Tensor]]], title: str, limit: int = 4
) -> tuple[Figure, str]:
    """Histograms of every score, a row a model: in-distribution filled, up to `limit` OOD sets as lines.

    values: as of `detection.table`, the in-distribution set first. Log scales; what lies outside the central 96% of
    every set shown joins the outer bins.
    """
    size = (11, 1.8 * len(values) + 0.9)
    fig, axes = plt.subplots(len(values), len(SCORES), figsize=size, squeeze=False, sharey=True)
    for line, (name, sets) in zip(axes, values.items(), strict=True):
        shown = list(sets)[: limit + 1]
        for ax, (score, (_, spread)) in zip(line, _SHOWN.items(), strict=True):
            parts = [spread(sets[label][score].numpy()) for label in shown]
            ends = np.array([np.quantile(part, (0.02, 0.98)) for part in parts])
            low, high = ends[:, 0].min(), ends[:, 1].max()
            n_bins = min(40, max(10, len(parts[0]) // 10))
            edges = np.linspace(low, high if high > low else low + 1, n_bins + 1)
            shares = [np.histogram(part.clip(edges[0], edges[-1]), edges)[0] / len(part) for part in parts]
            ax.stairs(shares[0], edges, fill=True, color="0.75", label=f"{shown[0]} (in)")
            for (color, dashes), label, share in zip(_SET_STYLES, shown[1:], shares[1:], strict=False):
                ax.stairs(share, edges, color=color, ls=dashes, lw=1.4, label=label)
            ax.locator_params(axis="x", nbins=4)
        line[0].set_ylabel(f"{name.split('-', 1)[-1]}\nshare of images", fontsize=9)
    smallest = 1 / max(len(part["log_px"]) for sets in values.values() for part in sets.values())
    axes[0, 0].set(yscale="log", ylim=(smallest / 2, 1.3))
    axes[0, 0].yaxis.set_minor_locator(NullLocator())
    for ax, (label, _) in zip(axes[-1], _SHOWN.values(), strict=True):
        ax.set_xlabel(label)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=limit + 1, frameon=False)
    fig.suptitle(title, parse_math=False)
    return fig, (
        f"{title}. One row a model ({', '.join(values)}), one column a score ({', '.join(SCORES)}), log scale; "
        f"grey: {shown[0]}; lines: {', '.join(shown[1:])}."
    )


def auroc_overview(table: pd.DataFrame, sets: Sequence[str], title: str) -> tuple[Figure, str]:
    """AUROC of every score and OOD set as annotated maps, a panel a score, a row a method; means over seeds.

    table: as of `detection.table`, for one data set; sets: the columns, in order. "n/a": a set that is not available.
    """
    methods = list(dict.fromkeys(table["method"]))
    mean = table.groupby(["score", "method", "ood_dataset"])["auroc"].mean()
    size = (0.72 * len(sets) * 2 + 2.4, 2 * (0.36 * len(methods) + 1.35))
    fig, axes = plt.subplots(2, 2, figsize=size, sharex=True, sharey=True)
    for ax, score in zip(axes.flat, SCORES, strict=True):
        grid = mean[score].unstack().reindex(index=methods, columns=list(sets))
        # 0.5 is chance and below it the score is wrong way round: a diverging map that colour-blind readers can tell
        sns.heatmap(grid, ax=ax, vmin=0, vmax=1, center=0.5, cmap="PuOr", annot=True, fmt=".2f", cbar=False,
                    annot_kws={"size": 8}, linewidths=0.5)  # fmt: skip
        for row, column in np.argwhere(grid.isna().to_numpy()):
            ax.text(column + 0.5, row + 0.5, "n/a", ha="center", va="center", fontsize=8, color="0.4")
        ax.grid(False)
        ax.set(xlabel="", ylabel="", title=_SCORE_LABELS[score], facecolor="0.93")
        ax.tick_params(axis="y", rotation=0)
    for ax in axes[-1]:
        ax.set_xticks(ax.get_xticks(), ax.get_xticklabels(), rotation=35, ha="right", rotation_mode="anchor")
    bar = fig.colorbar(axes[0, 0].collections[0], ax=axes, shrink=0.6)
    bar.set_label("AUROC (0.5: chance)")
    fig.suptitle(title, parse_math=False)
    best = table.dropna(subset=["auroc"]).groupby("score")["auroc"].mean()
    said = ", ".join(f"{score} {best[score]:.2f}" for score in SCORES if score in best)
    return fig, f"{title}. Four maps, methods by OOD sets. Mean AUROC by score: {said}."
