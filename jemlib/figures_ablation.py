"""Figures of the ablation: a map of cells and survival curves; each returns (figure, alt text)."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from jemlib.figures import METHOD_COLORS, readable

ARM_COLORS = {
    "plain": METHOD_COLORS["st_jem_plain"],
    "none": METHOD_COLORS["st_jem_none"],
    "own": METHOD_COLORS["st_jem_own"],
    "tempered": METHOD_COLORS["jem_joint"],
    "batch": METHOD_COLORS["st_jem"],
}
ARM_DASHES = {"plain": (1, 1), "none": (4, 1), "own": (5, 2), "tempered": (3, 1, 1, 1), "batch": ""}


def cells(summary: pd.DataFrame, quantity: str, title: str, label: str, better: str = "low") -> tuple[Figure, str]:
    """Arms by settings, each cell the mean of `quantity` over surviving runs; a cell without any says diverged.

    summary: as of `ablation.summary`; label: of the colour bar; better: whether low or high values are good, for the
    colours.
    """
    order = {"index": list(dict.fromkeys(summary["arm"])), "columns": list(dict.fromkeys(summary["setting"]))}
    wide = summary.pivot(index="arm", columns="setting")
    mean = wide[f"{quantity}_mean"].astype(float).reindex(**order)
    alive, seeds = (wide[name].reindex(**order) for name in ("alive", "seeds"))
    texts = mean.map("{:.3g}".format).where(mean.notna(), "diverged") + "\n(" + alive.astype(str) + " of "
    texts = texts + seeds.astype(str) + ")"
    fig, ax = plt.subplots(figsize=(1.5 * mean.shape[1] + 2.2, 0.62 * mean.shape[0] + 1.3))
    colours = "cividis_r" if better == "low" else "cividis"
    sns.heatmap(
        mean, annot=texts, fmt="", cmap=colours, linewidths=1, ax=ax, annot_kws={"size": 9}, cbar_kws={"label": label}
    )
    for i, j in zip(*mean.isna().to_numpy().nonzero(), strict=True):  # seaborn leaves empty cells unlabelled
        ax.text(j + 0.5, i + 0.5, texts.iloc[i, j], ha="center", va="center", size=9)
    readable(ax)
    ax.set(title=title, xlabel="sampler setting", ylabel="denominator")
    ax.tick_params(axis="y", rotation=0)
    ax.grid(False)
    said = "; ".join(f"{arm}: " + ", ".join(row.str.replace("\n", " ")) for arm, row in texts.iterrows())
    return fig, f"{title}. Settings {', '.join(order['columns'])}. {said}."


def survival(curves: pd.DataFrame, title: str) -> tuple[Figure, str]:
    """Share of runs alive by iteration, one line an arm. curves: as of `ablation.survival`, of one data set."""
    fig, ax = plt.subplots(figsize=(7, 3.6))
    for i, (arm, part) in enumerate(curves.groupby("arm", sort=False)):
        style = {"color": ARM_COLORS[arm], "dashes": ARM_DASHES[arm] or (None, None)}
        label = f"{arm} (n = {part['n'].iloc[0]})"
        ax.plot(part["step"], part["alive"] - 0.02 * i, drawstyle="steps-post", lw=2, label=label, **style)
    ax.set(title=title, xlabel="iteration", ylabel="share of runs alive\n(lines set 0.02 apart)", ylim=(-0.11, 1.05))
    fig.legend(*ax.get_legend_handles_labels(), loc="outside right center", frameon=False)
    ends = curves.groupby("arm", sort=False)["alive"].last()
    return fig, f"{title}. Alive at the end: " + ", ".join(f"{arm} {share:.0%}" for arm, share in ends.items()) + "."
