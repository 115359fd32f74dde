"""What a run says while it works: time left by an earlier run's cells and this machine's speed."""

import time

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from jemlib import watch


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_time_left_follows_an_earlier_run_and_this_machine(clock, capsys):
    told = watch.Watch(["01_a", "02_b"], {"01_a": [0.0, 20.0, 30.0], "02_b": [10.0]})
    assert told.left() == 60
    told.at_notebook("01_a")
    told.at_cell(0, 3)
    told.at_cell(1, 3)
    clock[0] = 5.0
    assert told.left() == 55
    clock[0] = 40.0
    assert told.left() == 40, "a cell that takes longer than it did is about to end"
    told.at_cell(2, 3)
    assert told.left() == 80, "this machine takes twice the time"
    assert "[1/2] 01_a: cell 3 of 3, 0:40 elapsed, about 1:20 left" in capsys.readouterr().out
    told.at_notebook("02_b")
    assert "[2/2] 02_b ..., about 0:10" in capsys.readouterr().out


def test_without_an_earlier_run_no_time_is_promised(clock, capsys):
    told = watch.Watch(["01_a", "02_b"], {"01_a": [1.0]})
    told.at_notebook("01_a")
    clock[0] = 30.0
    told.at_cell(0, 1)
    assert told.left() is None
    assert "0:30 elapsed, time left unknown before a first run" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "{"])
def test_a_damaged_copy_tells_no_times(tmp_path, content):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "01_a.ipynb").write_text(content)
    assert watch.known_times([tmp_path], ["01_a", "02_b"]) == {}


def test_times_of_the_first_folder_that_has_the_notebook(tmp_path):
    for name, seconds in (("one", 3.0), ("two", 5.0)):
        (tmp_path / name / "notebooks").mkdir(parents=True)
        cell = new_code_cell("1", metadata={"papermill": {"duration": seconds}})
        nbformat.write(new_notebook(cells=[cell]), tmp_path / name / "notebooks" / "01_a.ipynb")
    folders = [tmp_path / "none", tmp_path / "one", tmp_path / "two"]
    assert watch.known_times(folders, ["01_a", "02_b"]) == {"01_a": [3.0]}
