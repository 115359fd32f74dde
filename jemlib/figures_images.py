"""Figures of the image notebooks: sample grids and training curves; each returns (figure, alt text)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator, StrMethodFormatter
from torch import Tensor

from jemlib.data import Labelled
from jemlib.figures import METHOD_COLORS, METHOD_DASHES


def sample_grid(
    samples: Mapping[str, Labelled], classes: Sequence[str], rows: int, title: str, endings: Mapping[str, str]
) -> tuple[Figure, str]:
    """Class-conditional samples, a panel a method: columns are the classes asked for, rows are chains.

    samples: method -> images (N, C, H, W) in [-1, 1] and the labels asked for; endings: method -> how its run ended,
    shown where that is not "ok".
    """
    columns = max(1, min(2, len(samples)))
    lines = max(1, -(-len(samples) // columns))
    size = (0.42 * len(classes) * columns + 0.6, (0.42 * rows + 0.6) * lines + 0.5)
    fig, axes = plt.subplots(lines, columns, figsize=size, squeeze=False)
    for ax in axes.flat[len(samples) :]:
        ax.set_visible(False)
    for ax, (name, part) in zip(axes.flat, samples.items(), strict=False):
        tiles = part.x.new_zeros(rows, len(classes), *part.x.shape[1:])  # mid-grey where a class has too few
        for k in range(len(classes)):
            found = part.x[part.y == k][:rows]
            tiles[: len(found), k] = found
        _tile(ax, tiles)
        side = tiles.shape[-1]
        tilt = {"rotation": 30, "ha": "right"} if max(map(len, classes)) > 4 else {}
        ax.set_xticks([side * (k + 0.5) for k in range(len(classes))], classes, parse_math=False, **tilt)
        ax.tick_params(length=0)
        ax.set_yticks([])
        _name(ax, name, endings)
    fig.suptitle(title, parse_math=False)
    return fig, f"{title}. One panel a method ({', '.join(samples)}), one column a class, {rows} chains each."


def _tile(ax: Axes, tiles: Tensor) -> None:
    """Draw images (rows, columns, C, H, W) in [-1, 1] as one picture without gaps."""
    rows, columns, channels, height, width = tiles.shape
    picture = tiles.permute(0, 3, 1, 4, 2).reshape(rows * height, columns * width, channels)
    picture = picture.clamp(-1, 1).add(1).div(2).squeeze(-1).numpy()
    corners = (0, columns * width, rows * height, 0)
    ax.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest", extent=corners)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.grid(False)


def energies(
    histories: Mapping[str, Sequence[pd.DataFrame]], title: str, endings: Mapping[str, str]
) -> tuple[Figure, str]:
    """Mean energies of data and samples through training, a panel a method, and below their gap on one scale for all.

    histories: method -> one frame a seed, with columns step, energy_data, energy_samples, energy_gap (nats); endings:
    as of `sample_grid`. One line a seed.
    """
    shown = {name: runs for name, runs in histories.items() if "energy_samples" in runs[0]}
    columns = max(len(shown), 1)
    layout = {"sharex": True, "squeeze": False, "height_ratios": [3, 2]}
    fig, axes = plt.subplots(2, columns, figsize=(3 * columns, 4.8), **layout)
    for (above, below), (name, runs) in zip(axes.T, shown.items(), strict=True):
        below.sharey(axes[1, 0])  # before its line is drawn: limits of what was drawn are not taken over
        for i, run in enumerate(runs):
            data, samples = ("data", "samples") if i == 0 else (None, None)
            above.plot(run["step"], run["energy_data"], color=METHOD_COLORS[name], label=data)
            above.plot(run["step"], run["energy_samples"], color="black", lw=1, ls=(0, (3, 1.5)), label=samples)
            below.plot(run["step"], run["energy_gap"], color=METHOD_COLORS[name])
        _name(above, name, endings)
        # a diverging run leaves the range of the others by orders of magnitude
        if max(run["energy_data"].abs().max() for run in runs) > 1000:
            above.set_yscale("symlog", linthresh=100)
        below.set_xlabel("iteration")
        below.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        below.axhline(0, color="0.4", lw=0.8)
        below.set_yscale("symlog", linthresh=1)
        below.label_outer(remove_inner_ticks=True)
    axes[0, 0].set_ylabel("mean energy E(x)\n(nats, each its own scale)")
    axes[1, 0].set_ylabel("E(samples) − E(data)\n(nats, one scale for all)")
    if shown:
        axes[0, 0].legend(frameon=False)
    fig.suptitle(title, parse_math=False)
    gaps = {name: f"{runs[0]['energy_gap'].iloc[-1]:.2g}" for name, runs in shown.items()}
    said = ", ".join(f"{name} {gap}" for name, gap in gaps.items())
    dead = "".join(f" {name} {end}." for name, end in endings.items() if name in shown and end != "ok")
    return fig, f"{title}. Last gap between samples and data, first seed, nats: {said}.{dead}"


def _name(ax: Axes, name: str, endings: Mapping[str, str]) -> None:
    """A panel's title: the method in its colour, and how its run ended where it did not end well."""
    ending = endings.get(name, "ok")
    ax.set_title(name if ending == "ok" else f"{name}: {ending}", color=METHOD_COLORS[name], fontweight="bold")


def learning_curves(histories: Mapping[str, Sequence[pd.DataFrame]], title: str) -> tuple[Figure, str]:
    """Validation error (per cent, log scale) and NLL (nats) through training; one line a seed, a colour a method."""
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.6))
    for name, runs in histories.items():
        for i, run in enumerate(runs):
            if "val_accuracy" not in run:
                continue
            run = run.dropna(subset=["val_accuracy"])
            axes[0].plot(run["step"], 100 * (1 - run["val_accuracy"]), label=name if i == 0 else None, **line(name))
            axes[1].plot(run["step"], run["val_nll"], **line(name))
    for ax, label in zip(axes, ("validation error (%)", "validation NLL (nats)"), strict=True):
        ax.set(yscale="log", xlabel="iteration", ylabel=label)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.8)))
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    fig.suptitle(title, parse_math=False)
    ends = {name: runs[0].get("val_accuracy", pd.Series([float("nan")])).iloc[-1] for name, runs in histories.items()}
    said = ", ".join(f"{name} {end:.3f}" for name, end in ends.items())
    return fig, f"{title}. Last validation accuracy, first seed: {said}."


def line(name: str) -> dict:
    """Colour and dashes of a method's line, as keyword arguments of `Axes.plot`."""
    return {"color": METHOD_COLORS[name], "dashes": METHOD_DASHES[name] or (None, None)}
