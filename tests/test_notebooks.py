"""The notebooks as they are committed, and the whole chain under the smoke profile."""

import json
import re
import shutil
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from jemlib import compare, study
from jemlib.provenance import repo_root

ROOT = repo_root()
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_as_the_study_wants_it(path):
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code), "no outputs"
    assert cells[0].cell_type == "markdown" and "**Claim" in cells[0].source and "**Source" in cells[0].source
    assert "parameters" in code[0].metadata.get("tags", [])
    for line in code[0].source.splitlines():
        assert re.fullmatch(r"\w+: (str|int|float|bool) = .+  # .+", line), f"a typed scalar with a comment: {line}"
    assert "study.parameters(globals())" in code[1].source
    for cell in code:
        assert not re.search(r"^\s*(def|class)\s|\blambda\b|^\s*[!%]", cell.source, re.M), "helpers live in jemlib"


def artefacts(folder):
    paths = [*folder.glob("tables/*.csv"), *folder.glob("figures/*.png")]
    return {path.name: path.read_bytes() for path in paths if path.name != "timing.csv"}


COLUMNS = {
    "equations": "equation quantity error tolerance holds",
    "fixed_points": "negatives sampler predicted kl_to_prediction status",
    "toy_methods": "dataset method seed kl_nats kl_to_optimum mi_nats status",
    "mnist_methods": "data_source network method seed steps accuracy nll energy_gap class_agreement frechet n_frechet"
    " status",
    "cifar10_methods": "data_source network method seed steps accuracy nll energy_gap class_agreement frechet n_frechet"
    " status",
    "anchor_ablation": "dataset arm n_steps step_size reinit_prob lr seed accuracy energy_gap frechet kl_nats status"
    " diverged_at",
    "calibration": "model data_source temperature accuracy nll brier ece ece_adaptive n",
    "ood": "model in_dataset ood_dataset score auroc aupr fpr95 n_in n_out",
    "stability_map": "dataset method lr n_steps step_size seed kl_nats accuracy status diverged_at run",
    "timing": "what seconds ms_per_step peak_memory_mb device threads precision",
}


@pytest.mark.notebook
@pytest.mark.timeout(900)
def test_the_chain_writes_every_artefact(smoke):
    for name, columns in COLUMNS.items():
        table = pd.read_csv(smoke / "tables" / f"{name}.csv")
        assert len(table) and set(columns.split()) <= set(table.columns), name
    for path in NOTEBOOKS:
        assert (smoke / "reports" / f"{path.stem}.html").is_file()
        assert (smoke / "notebooks" / path.name).is_file()
        assert list((smoke / "figures").glob(f"{path.stem[:2]}_*.png"))
    assert (smoke / "index.html").is_file()


@pytest.mark.notebook
def test_every_row_names_its_record(smoke):
    table = pd.read_csv(smoke / "tables" / "mnist_methods.csv")
    for row in table.to_dict("records"):
        record = json.loads((smoke / "runs" / f"{row['run']}.json").read_text())
        assert record["config"]["method"] == row["method"] and record["status"] == row["status"]
        assert record["metrics"]["accuracy"] == pytest.approx(row["accuracy"], rel=1e-4)
        for key in ("config", "seed", "commit", "dirty", "versions", "device", "threads", "data"):
            assert key in record


@pytest.mark.notebook
@pytest.mark.timeout(900)
def test_the_same_command_twice_gives_the_same_bytes(smoke, tmp_path):
    before = Path(shutil.copytree(smoke, tmp_path / "before"))
    assert study.run("smoke", out=smoke, force=True) == 0
    first, second = artefacts(before), artefacts(smoke)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    report = compare.compare(before, smoke)  # nbdiff of the executed copies, too
    assert report.agree, report.differences
    assert all(f"{path.stem}" in report.compared for path in NOTEBOOKS), "equal to the last digit"
