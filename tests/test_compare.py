"""The gate: two folders agree, or the very cell is named."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from click.testing import CliRunner
from nbformat.v4 import new_code_cell, new_notebook, new_output

from jemlib import cli, compare
from jemlib.results import Store

TABLE = pd.DataFrame({
    "method": ["jem", "jem", "st_jem", "st_jem"], "seed": [0, 1, 0, 1], "accuracy": [0.91, 0.93, 0.97, 0.971],
    "frechet": [50.0, 54.0, 80.0, None], "status": ["diverged at step 52", "ok", "ok", "ok"], "run": list("abcd"),
})  # fmt: skip


def executed(number: float, count: int) -> nbformat.NotebookNode:
    output = new_output("stream", name="stdout", text=f"accuracy {number}\n")
    cell = new_code_cell("print()", outputs=[output], execution_count=count)  # its id is random
    cell.metadata["papermill"] = {"duration": number}
    return new_notebook(cells=[cell], metadata={"papermill": {"duration": count}})


@pytest.fixture
def folders(tmp_path):
    """Two folders with the same results."""
    store = Store(tmp_path / "one", "02_x", {"seed": 0})
    store.table("methods", TABLE)
    store.table("equations", pd.DataFrame({"equation": ["(1)"], "error": [1e-16], "holds": [True]}))
    (tmp_path / "one" / "notebooks").mkdir()
    nbformat.write(executed(0.97, 1), tmp_path / "one" / "notebooks" / "02_x.ipynb")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    nbformat.write(executed(0.97, 5), tmp_path / "two" / "notebooks" / "02_x.ipynb")
    return tmp_path / "one", tmp_path / "two"


def change(folder, row, column, value, name="methods"):
    path = folder / "tables" / f"{name}.csv"
    table = pd.read_csv(path)
    table.loc[row, column] = value
    table.to_csv(path, index=False, float_format="%.6g")


def other_machine(folder):
    path = folder / "artefacts" / "02_x.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cpu": "another"}))


def test_identical_runs_agree_and_nbdiff_is_silent(folders):
    report = compare.compare(*folders)
    assert report.agree, report.differences
    assert "to the last digit (same machine, threads and versions): 02_x" in report.compared
    assert "2 tables with 27 cells" in report.compared


def test_the_shipped_configuration_is_what_nbdiff_itself_reads(folders):
    copies = [str(folder / "notebooks" / "02_x.ipynb") for folder in folders]
    nbdiff = [str(Path(sys.executable).parent / "nbdiff"), "--no-color", *copies]
    environment = os.environ | {"JUPYTER_CONFIG_PATH": str(compare.NBDIME_CONFIG.parent)}
    assert subprocess.run(nbdiff, env=environment, capture_output=True, text=True, check=True).stdout == ""
    nbformat.write(executed(0.92, 1), copies[1])
    assert "0.92" in subprocess.run(nbdiff, env=environment, capture_output=True, text=True, check=True).stdout


def test_a_changed_cell_is_named_and_the_exit_code_is_1(folders):
    change(folders[1], 2, "accuracy", 0.97 * 1.05)
    done = CliRunner().invoke(cli.main, ["compare", *map(str, folders)])
    assert done.exit_code == 1
    first = done.output.splitlines()[0]
    assert first.startswith("tables/methods.csv row 3 (method=st_jem, seed=0), accuracy: 0.97 expected, 1.0185 found")
    assert "1 difference:" in done.output


def test_a_number_in_an_executed_copy_is_seen(folders):
    nbformat.write(executed(0.92, 1), folders[1] / "notebooks" / "02_x.ipynb")
    assert compare.compare(*folders).differences == ["notebooks/02_x.ipynb: nbdiff: modified /cells/0/outputs/0/text"]
    assert compare.compare(*folders, notebooks=False).agree


def test_missing_and_extra_artefacts(folders):
    (folders[1] / "tables" / "equations.csv").unlink()
    store = Store(folders[1], "02_x")
    store.table("new", TABLE)
    Store(folders[1], "03_y", {}).table("other", TABLE)
    found = compare.compare(*folders, notebooks=False).differences
    assert found == [
        "tables/equations.csv is missing", "tables/new.csv is extra", "03_y is extra: only one folder has run it",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "column", "value", "agree"),
    [
        (0, "status", "diverged at step 90", True),  # rounding moves the step
        (0, "status", "ok", False),
        (0, "accuracy", 0.91 + 0.05, True),  # within four deviations of its seeds
        (0, "accuracy", 0.91 + 0.06, False),
        (2, "accuracy", 0.975, False),  # seeds that agree better allow less
        (2, "frechet", 80 * 1.2, True),  # one seed: the column's own tolerance
        (2, "frechet", 80 * 1.5, False),
        (3, "frechet", 81.0, False),  # a number where there was none
        (1, "method", "jam", False),
        (1, "run", "other", False),
    ],
)
def test_another_machine_is_allowed_the_spread_of_seeds(folders, row, column, value, agree):
    other_machine(folders[1])
    change(folders[1], 0, "error", 3e-16, "equations")
    change(folders[1], row, column, value)
    report = compare.compare(*folders)
    assert report.agree is agree, report.differences


def test_a_folder_without_results_is_refused(folders, tmp_path):
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(cli.main, ["compare", str(folders[0]), str(tmp_path / "empty")])
    assert done.exit_code == 1 and "holds no results" in done.output
    assert CliRunner().invoke(cli.main, ["compare", str(folders[0]), str(tmp_path / "none")]).exit_code == 2


def test_a_spread_is_over_seeds_alone(tmp_path):
    """One seed on two OOD sets, two settings: what lies between those is no spread of seeds."""
    table = pd.DataFrame({
        "method": "jem", "ood_dataset": ["a", "b"], "lr": [0.01, 0.02], "seed": 0, "auroc": [0.2, 0.9], "status": "ok",
    })  # fmt: skip
    for name in ("one", "two"):
        Store(tmp_path / name, "05_x", {}).table("ood", table)
    change(tmp_path / "two", 0, "auroc", 0.4, "ood")
    for folder, cpu in (("one", "a"), ("two", "b")):
        path = tmp_path / folder / "artefacts" / "05_x.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"cpu": cpu}))
    (difference,) = compare.compare(tmp_path / "one", tmp_path / "two").differences
    where = "row 1 (method=jem, ood_dataset=a, lr=0.01, seed=0)"
    assert f"{where}, auroc: 0.2 expected, 0.4 found, tolerance 0.15" in difference
    change(tmp_path / "two", 0, "auroc", 0.2, "ood")
    change(tmp_path / "two", 1, "lr", 0.021, "ood")
    (difference,) = compare.compare(tmp_path / "one", tmp_path / "two").differences
    assert "lr: 0.02 expected, 0.021 found" in difference, "a setting is not measured"


def test_folders_that_do_not_say_where_they_ran_are_not_taken_for_one_machine(folders):
    for folder in folders:
        path = folder / "artefacts" / "02_x.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps({key: content[key] for key in ("tables", "figures")}))
    assert "to the last digit (same machine, threads and versions): none" in compare.compare(*folders).compared


def test_cells_of_numbers_and_words(folders):
    """Accuracies beside published numbers, some of which were not available."""
    for folder, value in zip(folders, ("38.1", "39.9"), strict=True):
        values = pd.DataFrame({"model": ["ours", "theirs"], "value": [value, "not available"], "note": ["here", ""]})
        Store(folder, "02_x").table("published", values)
    other_machine(folders[1])
    assert compare.compare(*folders).agree
    change(folders[1], 1, "value", "41.0", "published")
    assert "not available expected, 41.0 found" in compare.compare(*folders).differences[0]


@pytest.mark.parametrize("name", ["tables/methods.csv", "artefacts/02_x.json", "notebooks/02_x.ipynb"])
@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff"])
def test_a_damaged_file_is_named(folders, name, content):
    (folders[1] / name).write_bytes(content)
    outcome = CliRunner().invoke(cli.main, ["compare", *map(str, folders)])
    assert outcome.exit_code == 1
    if name.endswith("csv") and content == b"[1]":  # a table all the same, of another column
        assert "tables/methods.csv: the columns differ" in outcome.output
    else:
        assert outcome.output.splitlines() == [
            f"Error: {folders[1] / name} is damaged: delete it and run the same command again."
        ]
