"""Maps over a grid of settings: one panel a method, a number and the count of runs in every cell."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator

from jemlib.figures import readable

_OUTLINE = {"fill": False, "edgecolor": "#d62728", "linewidth": 2.5}


def maps(
    counts: pd.DataFrame,
    value: str,
    title: str,
    label: str,
    *,
    x: str,
    y: str,
    panel: str,
    columns: int = 2,
    marked: pd.DataFrame | None = None,
    marked_label: str = "",
    log: bool = False,
    better: str = "high",
) -> tuple[Figure, str]:
    """Panels of y by x, coloured by `value`, with "alive/runs" in every cell; (figure, alt text).

    counts: as of `sweep.counts`, with the columns x, y and panel; marked: rows of x, y and panel that get an outline,
    which the legend calls marked_label; better: whether high or low values are good, for the colours. A cell without a
    value has its count on grey.
    """
    panels = list(dict.fromkeys(counts[panel]))
    order = {"index": sorted(set(counts[y])), "columns": sorted(set(counts[x]))}
    known = counts[value].dropna().astype(float)
    low, high = (0.0, 1.0) if value == "share" else (known.min(), known.max())
    colours = {"norm": LogNorm(low, high)} if log and low > 0 else {"vmin": low, "vmax": high}
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    size = (max(6.0, columns * (0.78 * len(order["columns"]) + 0.9) + 1.2), lines * (0.5 * len(order["index"]) + 1.2))
    fig, axes = plt.subplots(lines, columns, figsize=size, sharex=True, sharey=True, squeeze=False)
    said = []
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, name in zip(axes.flat, panels, strict=False):
        part = counts[counts[panel] == name].pivot(index=y, columns=x).reindex(index=order["index"])
        number, alive, runs = (part[key].reindex(columns=order["columns"]) for key in (value, "alive", "runs"))
        number = number.astype(float)
        count = alive.map("{:.0f}".format) + "/" + runs.map("{:.0f}".format)
        texts = count if value == "share" else (number.map("{:.3g}".format) + "\n").where(number.notna(), "") + count
        texts = texts.where(runs.notna(), "–")
        sns.heatmap(
            number, cmap="cividis" if better == "high" else "cividis_r", cbar=False, linewidths=1, ax=ax,
            annot=texts, fmt="", annot_kws={"size": 8}, **colours,
        )  # fmt: skip
        ax.set_facecolor("0.85")
        for i, j in zip(*number.isna().to_numpy().nonzero(), strict=True):  # seaborn leaves empty cells unlabelled
            ax.text(j + 0.5, i + 0.5, texts.iloc[i, j], ha="center", va="center", size=8)
        readable(ax)
        if marked is not None:
            for row in marked[marked[panel] == name].to_dict("records"):
                corner = (order["columns"].index(row[x]), order["index"].index(row[y]))
                ax.add_patch(Rectangle(corner, 1, 1, **_OUTLINE))
        ax.set(title=name, xlabel=x, ylabel=y)
        ax.tick_params(axis="y", rotation=0)
        ax.tick_params(axis="x", rotation=0)
        ax.grid(False)
        flat = texts.map(lambda text: text.replace("\n", " "))
        said.append(f"{name}: " + "; ".join(f"{y} {i}: {', '.join(row)}" for i, row in flat.iterrows()))
    for ax in axes.flat:
        ax.label_outer()
    fig.suptitle(title, size=11)
    if marked is not None and len(marked):
        handle = Rectangle((0, 0), 1, 1, label=marked_label, **_OUTLINE)
        fig.legend(handles=[handle], loc="outside lower center", frameon=False)
    ticks = {"ticks": LogLocator(subs=(1.0, 3.0)), "format": "%g"} if "norm" in colours else {}
    bar = fig.colorbar(axes.flat[0].collections[0], ax=axes, label=label, shrink=0.8, **ticks)
    bar.ax.minorticks_off()
    shown = ", ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in order["columns"])
    about = f"{title}. {label} with runs alive of all, by {y} and, from left to right, {x} {shown}"
    return fig, ". ".join([about, *said])
