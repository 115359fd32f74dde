"""Figures and progress: what they say, not how they look."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import seaborn as sns
import torch

from jemlib import figures, figures_images
from jemlib.data import Labelled
from jemlib.objectives import METHODS
from jemlib.progress import Progress, a_person_watches


def test_every_method_has_a_colour_and_dashes_of_its_own():
    shown = {*METHODS, "oracle"}
    assert shown <= figures.METHOD_COLORS.keys() and shown <= figures.METHOD_DASHES.keys()
    assert len({figures.METHOD_COLORS[name] for name in shown}) == len(shown)


def test_sample_grid_puts_each_class_in_its_column():
    x = torch.stack([torch.full((1, 2, 2), value) for value in (-1.0, 1.0, 1.0, -1.0)])
    part = Labelled(x, torch.tensor([0, 1, 1, 0]))
    fig, alt = figures_images.sample_grid({"jem": part}, ["a", "b", "c"], 2, "title", {"jem": "diverged at step 3"})
    (ax,) = [ax for ax in fig.axes if ax.get_visible()]
    picture = ax.images[0].get_array()
    assert picture[:, :2].max() == 0 and picture[:, 2:4].min() == 1, "columns are classes"
    assert (picture[:, 4:] == 0.5).all(), "a class without samples is grey"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "b", "c"]
    assert ax.get_title() == "jem: diverged at step 3" and alt.startswith("title.")


def test_training_curves_say_gaps_and_endings():
    row = {"energy_data": -2.0, "energy_samples": -1.5, "energy_gap": 0.5}
    frame = pd.DataFrame(
        [{"step": step, "val_accuracy": 0.8 + step / 20, "val_nll": 1 / step} | row for step in (1, 2)]
    )
    histories = {"softmax": [frame[["step", "val_accuracy", "val_nll"]]], "st_jem": [frame]}
    fig, alt = figures_images.energies(histories, "title", {"st_jem": "diverged at step 2"})
    assert len(fig.axes) == 2 and "st_jem 0.5" in alt and "st_jem diverged at step 2" in alt
    _, alt = figures_images.learning_curves(histories, "title")
    assert "softmax 0.900, st_jem 0.900" in alt


def test_numbers_of_a_heatmap_stand_out_from_their_cells():
    fig, ax = plt.subplots()
    sns.heatmap(np.array([[0.0, 1.0], [0.9, np.nan]]), cmap="Greys", annot=True, ax=ax)
    ax.text(1.5, 1.5, "none")  # what the figures write where a cell has no value
    figures.readable(ax)
    assert [text.get_color() for text in ax.texts] == ["black", "white", "white", "black"]
    plt.close(fig)


@pytest.mark.parametrize(("wish", "bar"), [("bar", True), ("lines", False), ("none", False)])
def test_the_environment_chooses_the_progress(monkeypatch, wish, bar):
    monkeypatch.setenv("JEMLIB_PROGRESS", wish)
    assert a_person_watches() is bar


def test_a_kernel_of_a_jupyter_server_is_watched(monkeypatch):
    monkeypatch.delenv("JEMLIB_PROGRESS", raising=False)
    monkeypatch.setattr("sys.stderr", open("/dev/null"))  # noqa: SIM115
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert not a_person_watches()
    monkeypatch.setenv("JPY_SESSION_NAME", "02_mnist.ipynb")
    assert a_person_watches()


def test_a_log_gets_a_few_lines_and_a_second_reading_the_same(monkeypatch, capsys):
    monkeypatch.setenv("JEMLIB_PROGRESS", "lines")
    rows = [{"step": step, "nll": 1.0 / step} for step in range(1, 101)]
    with Progress("st_jem", 100) as progress:
        for row in rows:
            progress.update(row["step"], row)
        progress.close("ok")
    first = capsys.readouterr().out
    assert first.count("\n") == 4 and "step 100/100  nll 0.01" in first
    Progress("st_jem", 100).replay(rows, "ok")
    assert capsys.readouterr().out == first
    Progress("st_jem", 100).replay(rows[:30], "diverged at step 29")
    assert capsys.readouterr().out.splitlines()[-1] == "st_jem: diverged at step 29"
