"""Figures of the study: one function a figure, each returns (figure, alt text). One colour a method throughout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jemlib.toy import Toy
from jemlib.toy_runs import ToyRun

_COLORS = sns.color_palette("colorblind").as_hex()
METHOD_COLORS: dict[str, str] = {
    "softmax": _COLORS[7],
    "jem": _COLORS[3],
    "jem_joint": _COLORS[1],
    "st_jem": _COLORS[0],
    "st_jem_own": _COLORS[9],
    "st_jem_none": _COLORS[2],
    "st_jem_plain": _COLORS[4],
    "st_jem_mi": _COLORS[5],
    "oracle": "#000000",
}
_DASHES: list[tuple[float, ...] | str] = ["", (1, 1), (4, 1), "", (5, 2), (3, 1, 1, 1), (2, 1), (6, 1), ""]
METHOD_DASHES = dict(zip(METHOD_COLORS, _DASHES, strict=True))
DENSITY_MAP = "viridis"


def style() -> None:
    """The house style: readable at 900 pixels, colour-blind safe, no state left from earlier figures; tables whole."""
    pd.set_option("display.max_colwidth", None, "display.max_rows", 200)
    mpl.rcdefaults()
    sns.set_theme(context="notebook", style="whitegrid", palette="colorblind")
    mpl.rcParams.update({"figure.constrained_layout.use": True, "axes.titlesize": 11, "axes.labelsize": 11,
                         "legend.fontsize": 9, "xtick.labelsize": 9, "ytick.labelsize": 9})  # fmt: skip


def readable(ax: Axes) -> None:
    """Write a heatmap's numbers in black or white, whichever stands out more from the cell; black on empty ones."""
    mesh = ax.collections[0]
    mesh.update_scalarmappable()
    colours = mesh.get_facecolors().reshape(*mesh.get_array().shape, 4)
    linear = np.where(colours <= 0.04, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    luminance = linear[..., :3] @ (0.2126, 0.7152, 0.0722)
    dark = (luminance < 0.179) & ~np.ma.getmaskarray(mesh.get_array())  # 0.179: both contrasts are equal
    for text in ax.texts:
        x, y = text.get_position()
        text.set_color("white" if dark[int(y), int(x)] else "black")


# --- notebook 01: exact references and toy distributions ----------------------------------------------------


def stationary_distributions(curves: pd.DataFrame, title: str) -> tuple[Figure, str]:
    """Where updates come to rest on a finite space. curves: as of `equations.fixed_points`."""
    samplers = list(dict.fromkeys(curves["sampler"]))
    fig, axes = plt.subplots(1, len(samplers), figsize=(9, 3.4), sharey=True)
    colours = {"plain average": METHOD_COLORS["jem"], "weights": METHOD_COLORS["st_jem_none"],
               "weights, whole batch": METHOD_COLORS["st_jem"]}  # fmt: skip
    markers = {"plain average": "v", "weights": "o", "weights, whole batch": "s"}
    for ax, sampler in zip(axes, samplers, strict=True):
        part = curves[curves["sampler"] == sampler]
        data = part.drop_duplicates("state")
        ax.bar(data["state"], data["p_data"], color="0.8", width=0.85, label="p_data")
        for name in colours:
            rows = part[part["negatives"] == name]
            if rows["measured"].notna().any():
                ax.plot(rows["state"], rows["predicted"], color=colours[name], lw=1.2)
                ax.plot(rows["state"], rows["measured"], markers[name], color=colours[name], ms=4, label=name)
            elif len(rows):
                ax.plot([], [], markers[name], color=colours[name], ms=4, label=f"{name}: diverges")
        ax.set(title=f"sampler: {sampler}", xlabel="state, in order of p_data")
        ax.legend()
    axes[0].set_ylabel("probability")
    fig.suptitle(title)
    return fig, (
        f"{title}. Two panels of probabilities over states, the data as grey bars. With a perfect sampler the plain "
        "average matches the bars, weights and whole batch are flatter; with a uniform sampler the weights match them, "
        "the whole batch is flatter and the plain average has no distribution. Measured points lie on predicted lines."
    )


def estimator_errors(rows: pd.DataFrame, size: int, title: str) -> tuple[Figure, str]:
    """Bias, spread and cosine of gradient estimators. rows: as of `estimators.compare`; size: N of the upper row."""
    fig, axes = plt.subplots(2, 3, figsize=(9, 5.6))
    quantities = [
        ("bias", "bias / |exact gradient|"),
        ("std", "std / |exact gradient|"),
        ("cosine", "cosine, one estimate"),
    ]
    palette = dict(
        zip(dict.fromkeys(rows["estimator"]), [_COLORS[3], _COLORS[1], _COLORS[2], _COLORS[9], _COLORS[0]], strict=True)
    )
    by_share = rows[rows["n_samples"] == size].drop_duplicates(["estimator", "uniform_share"])
    by_size = rows[rows["uniform_share"] == 1]
    sizes = sorted(set(by_size["n_samples"]))
    common = {"hue": "estimator", "style": "estimator", "palette": palette, "markers": True, "dashes": True}
    for column, (quantity, label) in enumerate(quantities):
        sns.lineplot(by_share, x="uniform_share", y=quantity, ax=axes[0, column], legend=column == 0, **common)
        sns.lineplot(by_size, x="n_samples", y=quantity, ax=axes[1, column], legend=False, **common)
        axes[0, column].set(xlabel=f"share of uniform noise (N = {size})", ylabel=label)
        axes[1, column].set(xlabel="samples N (uniform noise)", ylabel=label, xscale="log")
        axes[1, column].set_xticks(sizes, [str(n) for n in sizes], minor=False)
        axes[1, column].minorticks_off()
    handles, labels = axes[0, 0].get_legend_handles_labels()
    axes[0, 0].get_legend().remove()
    fig.legend(handles, labels, loc="outside lower center", ncols=3)
    fig.suptitle(title)
    return fig, (
        f"{title}. Six panels. Upper row: the bias of the plain average rises from zero with the share of uniform "
        "noise while that of the weighted estimators falls, to zero for weights alone; the whole batch has the "
        "smallest spread. Lower row: with uniform noise, spread falls with the number of samples; the plain average "
        "keeps its bias."
    )


def density_maps(found: Sequence[ToyRun], n_samples: int = 250) -> tuple[Figure, str]:
    """p(x) of the data and of each run on one colour scale, with the run's last chains. found: runs of one data set."""
    space, toy = found[0].reference.space, Toy(found[0].dataset)
    side = round(len(space.points) ** 0.5)
    data = found[0].reference.log_data.logsumexp(1).exp()
    top = float(data.max())
    panels = [("p_data\nchains: white dots", data, None)]
    panels += [(_title(run), run.density(), run.result.buffer) for run in found]
    columns = 3
    lines = -(-len(panels) // columns)
    fig, axes = plt.subplots(lines, columns, figsize=(9, 2.9 * lines), sharex=True, sharey=True, squeeze=False)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, (title, density, buffer) in zip(axes.flat, panels, strict=False):
        image = ax.imshow(
            density.view(side, side), origin="lower", extent=(-1, 1, -1, 1), cmap=DENSITY_MAP, vmin=0, vmax=top
        )
        if buffer is not None:
            x = buffer.x[:n_samples]
            ax.scatter(x[:, 0], x[:, 1], s=3, color="white", edgecolors="none", alpha=0.8)
        ax.set_title(title)
        ax.grid(False)
        ax.set_xticks([-1, 0, 1])
        ax.set_yticks([-1, 0, 1])
    for ax in axes[-1]:
        ax.set_xlabel("x1")
    for ax in axes[:, 0]:
        ax.set_ylabel("x2")
    fig.colorbar(image, ax=axes, label="density p(x), per unit area", shrink=0.6, extend="max")
    named = "; ".join(title.replace("\n", ", ") for title, _, _ in panels[1:])
    return fig, f"Maps of p(x) for {toy.name} beside the data's density, chains as white dots: {named}."


def _title(run: ToyRun) -> str:
    state = "" if run.result.status == "ok" else " (diverged)"
    return f"{run.method}, seed {run.seed}{state}\nKL to data {run.scores['kl_nats']:.3f} nats"


def through_training(history: pd.DataFrame, quantities: dict[str, str], title: str) -> tuple[Figure, str]:
    """Monitors by iteration, a line the median over seeds, a band their range. quantities: column -> axis label."""
    fig, axes = plt.subplots(1, len(quantities), figsize=(9, 4.2))
    methods = list(dict.fromkeys(history["method"]))
    for i, (ax, (column, label)) in enumerate(zip(axes, quantities.items(), strict=True)):
        sns.lineplot(
            history, x="step", y=column, hue="method", style="method", hue_order=methods, style_order=methods,
            palette=METHOD_COLORS, dashes=METHOD_DASHES, estimator="median", errorbar=("pi", 100), legend=i == 0, ax=ax,
        )  # fmt: skip
        ax.set(xlabel="iteration", ylabel=label)
    axes[0].set_yscale("log")
    handles, labels = axes[0].get_legend_handles_labels()
    axes[0].get_legend().remove()
    fig.legend(handles, labels, loc="outside lower center", ncols=4)
    fig.suptitle(title)
    history = history.dropna(subset=list(quantities))  # the row in which a run diverged has no score
    last = history[history["step"] == history.groupby(["method", "seed"])["step"].transform("max")]
    ends = last.groupby("method", sort=False)[list(quantities)].median()
    said = "; ".join(
        f"{m}: " + ", ".join(f"{v:.3g}" for v in row) for m, row in zip(ends.index, ends.to_numpy(), strict=True)
    )
    return (
        fig,
        f"{title}. {' and '.join(quantities.values())} by iteration. At the last logged iteration, medians: {said}.",
    )


def divergence(history: pd.DataFrame, statuses: dict[str, Iterable[str]], title: str) -> tuple[Figure, str]:
    """Energy gap and KL by iteration where the sampler has failed. statuses: method -> its runs' endings."""
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharex=True)
    methods = list(dict.fromkeys(history["method"]))
    for ax, column, label in zip(
        axes, ("energy_gap", "kl_nats"), ("E(samples) - E(data), nats", "KL(p_data || p), nats"), strict=True
    ):
        part = history.dropna(subset=[column])
        sns.lineplot(
            part, x="step", y=column, hue="method", style="method", hue_order=methods, style_order=methods,
            palette=METHOD_COLORS, dashes=METHOD_DASHES, estimator=None, units="seed", markers=True,
            legend=column == "energy_gap", ax=ax,
        )  # fmt: skip
        ax.set(xlabel="iteration", ylabel=label, yscale="log")
    handles, labels = axes[0].get_legend_handles_labels()
    axes[0].get_legend().remove()
    endings = {name: ", ".join(sorted(set(found))) for name, found in statuses.items()}
    labels = [name if endings.get(name, "ok") == "ok" else f"{name}: {endings[name]}" for name in labels]
    fig.legend(handles, labels, loc="outside lower center", ncols=2)
    fig.suptitle(title)
    said = "; ".join(f"{name}: {ending}" for name, ending in endings.items())
    return fig, f"{title}. Energy gap and KL by iteration. Endings: {said}."
