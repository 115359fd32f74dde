"""Artefacts: byte-identical tables and figures, valid JSON, merged timings, one clear error."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from jemlib.files import ResultsError, absolute, read_notebook
from jemlib.provenance import provenance, repo_root
from jemlib.results import Store


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "results", "02_mnist")


def test_a_table_is_byte_identical_on_a_re_run(store):
    frame = pd.DataFrame({"method": ["jem", "st_jem"], "x": [1 / 3, float("nan")], "n": [10, 20]}, index=[5, 6])
    assert store.table("t", frame) is frame
    path = store.dir / "tables" / "t.csv"
    first = path.read_bytes()
    assert first == b"method,x,n\njem,0.333333,10\nst_jem,,20\n"
    store.table("t", frame)
    assert path.read_bytes() == first
    pd.testing.assert_frame_equal(store.read_table("t"), frame.reset_index(drop=True), rtol=1e-5)


def test_a_figure_is_byte_identical_and_carries_its_alt_text(store):
    alt = 'Energy <E> over steps, "st_jem" in blue; α'

    def draw():
        fig, ax = plt.subplots(figsize=(3, 2))
        ax.plot(np.arange(5), label="a")
        ax.legend()
        return store.figure("energies", fig, alt)

    path = store.dir / "figures" / "02_energies.png"
    image = draw()
    first = path.read_bytes()
    draw()
    assert path.read_bytes() == first
    with Image.open(path) as picture:
        assert picture.info["Description"] == alt and picture.mode == "RGB"
    assert image._repr_mimebundle_()[1]["image/png"]["alt"] == alt
    assert plt.get_fignums() == []
    with pytest.raises(ValueError, match="alt text"):
        store.figure("energies", plt.figure(), " ")
    plt.close("all")


def test_timings_merge_by_what(store):
    store.timing([{"what": "b", "seconds": 2.0}, {"what": "a", "seconds": 1.0, "device": "cpu", "threads": 2}])
    store.timing({"what": "b", "seconds": 3.0, "ms_per_step": 4.5})
    lines = (store.dir / "tables" / "timing.csv").read_text().splitlines()
    assert lines == [
        "what,seconds,ms_per_step,peak_memory_mb,device,threads,precision", "a,1,,,cpu,2,", "b,3,4.5,,,,"
    ]  # fmt: skip


def test_timings_of_several_writers_are_all_kept(store):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: store.timing({"what": f"row {i:02}", "seconds": i}), range(12)))
    assert len(store.read_table("timing")) == 12


def test_a_record_is_valid_json_whatever_a_diverged_run_holds(store):
    content = {
        "b": {"loss": float("nan"), "energy": float("-inf"), "limit": math.inf},
        "a": [np.float32(0.5), torch.tensor(2), np.int64(3), np.array([1.0, np.nan])],
        "path": store.dir, "status": "diverged at step 7", "none": None, "flag": True,
    }  # fmt: skip
    path = store.record("run", content)
    first = path.read_bytes()

    def refuse(constant):
        raise AssertionError(constant)

    plain = json.loads(first, parse_constant=refuse)
    assert list(plain) == sorted(plain)
    assert plain["b"] == {"loss": "NaN", "energy": "-Infinity", "limit": "Infinity"}
    read = store.read_record("run")
    assert math.isnan(read["b"]["loss"]) and read["b"]["energy"] == -math.inf
    assert read["a"][:3] == [0.5, 2, 3] and read["flag"] is True
    store.record("run", content)
    assert path.read_bytes() == first


def test_what_is_missing_is_said(store):
    with pytest.raises(ResultsError, match="run the notebook that writes it"):
        store.read_record("nothing")
    with pytest.raises(ResultsError, match="run the notebook that writes it"):
        store.read_table("nothing")


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="results folder"):
        Store(tmp_path / "file" / "results", "01")


def test_relative_folders_count_from_the_repository(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jemlib.results.repo_root", lambda: tmp_path / "repo")
    store = Store("results/quick", "01_toy_2d")
    assert store.dir == tmp_path / "repo" / "results" / "quick"
    assert store.checkpoint_path("run").parent.is_dir()
    assert not list(store.dir.rglob("*.tmp"))


def test_provenance():
    facts = provenance()
    assert {"commit", "dirty", "versions", "device", "threads", "cpu", "platform"} <= facts.keys()
    assert facts["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    json.dumps(facts)


def test_provenance_outside_git(monkeypatch, tmp_path):
    monkeypatch.setattr("jemlib.provenance.repo_root", lambda: tmp_path)
    assert provenance()["commit"] is None
    assert provenance()["dirty"] is None
    assert (repo_root() / "jemlib").is_dir()


def test_the_manifest_traces_every_artefact_to_its_runs(tmp_path):
    folder = tmp_path / "results"
    store = Store(folder, "02_mnist", {"seed": 3, "results_dir": str(folder), "data_dir": ""})
    store.record("early", {"status": "ok"})
    store.uses(["early"])
    store.figure("first", plt.figure(figsize=(1, 1)), "nothing")
    store.uses(["early", "late"])
    store.table("own", pd.DataFrame({"run": ["late", "late"], "x": [1, 2]}))
    store.table("all", pd.DataFrame({"x": [1, 2]}))
    store.headline("Two runs.", thumbnail="first")
    manifest = Store(tmp_path / "results", "02_mnist").manifest()
    assert manifest["parameters"] == {"seed": 3, "results_dir": "<results>", "data_dir": ""}, "no folder of the machine"
    assert manifest["figures"] == {"02_first": {"alt": "nothing", "runs": ["early"]}}
    assert manifest["tables"] == {"own": {"runs": ["late"]}, "all": {"runs": ["early", "late"]}}
    assert (manifest["headline"], manifest["thumbnail"]) == ("Two runs.", "02_first")
    for key in ("commit", "dirty", "versions", "device", "threads", "cpu"):
        assert key in manifest
    missing = {path.name for path in store.files() if not path.is_file()}
    assert missing == {"late.json", "early.pt", "late.pt"}
    store.clear()
    assert store.manifest() == {} and not list((tmp_path / "results").glob("*/*.csv"))
    assert (tmp_path / "results" / "runs" / "early.json").is_file(), "runs are kept"


def test_damaged_files_are_named_and_go_with_the_next_run(tmp_path):
    store = Store(tmp_path, "01_x", {"seed": 0})
    store.record("run", {"seed": 0})
    store.timing({"what": "a", "seconds": 1.0})
    for path in tmp_path.glob("*/*.*"):
        path.write_bytes(path.read_bytes()[:5] if path.suffix == ".json" else b"")
    for read, name in ((store.manifest, "01_x"), (lambda: store.read_record("run"), "run")):
        with pytest.raises(ResultsError, match=f"{name}.json is damaged: delete it"):
            read()
    store.timing({"what": "b", "seconds": 2.0})
    assert store.read_table("timing")["what"].tolist() == ["b"]
    (tmp_path / "tables" / "other.csv").write_text("")
    with pytest.raises(ResultsError, match=r"other\.csv is damaged: delete it"):
        store.read_table("other")
    store.headline("It heals.", "")
    assert store.manifest()["headline"] == "It heals."
    store.clear()
    assert store.manifest() == {}


@pytest.mark.parametrize("content", ["", "{", "{}", "[1]", '{"nbformat": 4, "cells": null, "metadata": {}}'])
def test_what_is_no_notebook_is_named(tmp_path, content):
    (tmp_path / "01_a.ipynb").write_text(content)
    with pytest.raises(ResultsError, match=r"01_a\.ipynb is damaged: delete it"):
        read_notebook(tmp_path / "01_a.ipynb")


def test_a_home_folder_is_read_as_one(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert absolute("~/x") == absolute("x") == tmp_path / "x"
    assert absolute("~nobody-of-that-name/x") == tmp_path / "~nobody-of-that-name" / "x"
