"""Out-of-distribution sets: in the shape and range of the model's own images, the same on every run."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from jemlib import data, ood
from jemlib.data import DataError, Dataset, Labelled, to_range
from jemlib.ood import NotAvailable, ood_sets

MADE = ["photo_patches", "uniform", "gaussian", "constant", "interpolation", "shuffled_pixels"]


@pytest.fixture(autouse=True)
def closed(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "repo_root", lambda: tmp_path / "repository")
    monkeypatch.delenv("JEMLIB_DATA", raising=False)
    monkeypatch.setattr(data.subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(OSError("no network")))
    for fetch in ("_from_torchvision", "_from_npm"):
        monkeypatch.setattr(data, fetch, lambda name, folder: (_ for _ in ()).throw(RuntimeError("no network")))


def pictures(channels=3, size=32, n=60, name="pictures"):
    generator = torch.Generator().manual_seed(0)
    x = to_range(torch.randint(0, 256, (n, channels, size, size), generator=generator))
    part = Labelled(x, torch.arange(n) % 10)
    return Dataset(name, name, "0" * 12, tuple("0123456789"), part, part, part)


@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 32), (3, 64)])
def test_every_set_has_shape_range_and_steps_of_the_images(channels, size):
    found = ood_sets(pictures(channels, size), MADE, 25, seed=0)
    assert list(found) == MADE
    for name, x in found.items():
        assert x.shape == (25, channels, size, size) and x.dtype == torch.float32, name
        assert x.min() >= -1 and x.max() <= 1
        pixels = (x + 1) * 127.5
        assert torch.allclose(pixels, pixels.round(), atol=1e-3), f"{name} has the 8-bit steps of real images"
        assert len(x.flatten(1).unique(dim=0)) > (10 if name == "constant" else 20)


def test_sets_depend_on_name_and_seed_alone():
    images = pictures()
    first = ood_sets(images, MADE, 20, seed=0)
    torch.manual_seed(5)
    other = ood_sets(images, MADE[::-1], 20, seed=0)
    assert all(torch.equal(first[name], other[name]) for name in MADE)
    changed = ood_sets(images, MADE[1:], 20, seed=1)
    assert not any(torch.equal(first[name], changed[name]) for name in changed)


def test_what_the_made_sets_are():
    images = pictures()
    found = ood_sets(images, MADE, 50, seed=0)
    assert (found["constant"].flatten(2).std(2) == 0).all() and found["constant"].std() > 0.3
    assert abs(found["uniform"].mean()) < 0.01 and abs(found["uniform"].std() - 3**-0.5) < 0.01
    assert abs(found["gaussian"].mean()) < 0.01 and 0.45 < found["gaussian"].std() < 0.5
    test = images.test.x
    means = (test[:, None] + test[None]) / 2
    distance = (found["interpolation"][:5, None, None] - means).abs().amax((3, 4, 5))
    for row in distance:
        i, j = divmod(int(row.argmin()), len(test))
        assert i != j and row.min() < 1 / 127, "the mean of two different test images"
    for x in found["shuffled_pixels"][:5]:
        colours = x.flatten(1).T.tolist()
        match = [image for image in test if sorted(image.flatten(1).T.tolist()) == sorted(colours)]
        assert len(match) == 1 and not torch.equal(match[0], x), "pixels keep their colours and change their places"
    assert len({tuple(x.flatten().tolist()) for x in found["shuffled_pixels"]}) == 50


def test_grey_is_pils_grey_and_sizes_are_interpolated():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (8, 28, 28, 3), dtype=np.uint8)
    grey = ood.like(torch.from_numpy(pixels).permute(0, 3, 1, 2), pictures(1, 28).test.x)
    expected = np.stack([np.asarray(Image.fromarray(image).convert("L")) for image in pixels])
    assert (to_range(torch.from_numpy(expected)) - grey[:, 0]).abs().max() <= 1.01 / 127.5
    flat = torch.full((2, 1, 28, 28), 77, dtype=torch.uint8)
    colour = ood.like(flat, pictures(3, 32).test.x)
    assert colour.shape == (2, 3, 32, 32) and torch.allclose(colour, to_range(torch.tensor(77.0)))


def test_fewer_images_than_asked_for():
    assert len(ood_sets(pictures(n=8), ["shuffled_pixels"], 50, seed=0)["shuffled_pixels"]) == 8


def test_what_cannot_be_had_is_a_value():
    found = ood_sets(pictures(), ["SVHN", "CIFAR100", "CIFAR10", "FashionMNIST", "uniform"], 5, seed=0)
    for name in ("SVHN", "CIFAR100", "CIFAR10", "FashionMNIST"):
        assert found[name].reason == f"{name} is neither here nor to be downloaded"
    assert found["uniform"].shape == (5, 3, 32, 32)
    again = ood_sets(pictures(), ["SVHN"], 5, seed=0)["SVHN"]
    assert again.reason == found["SVHN"].reason, "the reason is the same on every run"


def test_files_that_are_not_whole_are_not_used(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test_32x32.mat").write_bytes(b"<html>")
    found = ood_sets(pictures(), ["SVHN"], 5, seed=0, data_dir=tmp_path / "data")["SVHN"]
    assert found.reason == "the files of SVHN are damaged or not whole"


def test_a_cifar10_that_is_damaged_is_a_value_too(tmp_path):
    (tmp_path / "data" / "cifar10" / "train").mkdir(parents=True)
    found = ood_sets(pictures(), ["CIFAR10", "uniform"], 5, seed=0, data_dir=tmp_path / "data")
    assert found["CIFAR10"].reason == "CIFAR10 is neither here nor to be downloaded"
    assert found["uniform"].shape == (5, 3, 32, 32)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (subprocess.CalledProcessError(1, "python", stderr="Traceback\nURLError: refused\n\n"), "URLError: refused"),
        (subprocess.CalledProcessError(1, "python", stderr=" \n"), "Command 'python' returned non-zero exit status 1."),
        (subprocess.TimeoutExpired("python", 600, stderr=b"half \xff\n"), "half \ufffd"),
        (subprocess.TimeoutExpired("python", 600), "Command 'python' timed out after 600 seconds"),
        (OSError(), ""),
    ],
)
def test_a_failed_download_says_its_last_line(monkeypatch, error, said):
    monkeypatch.setattr(data.subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(error))
    with pytest.raises(DataError) as caught:
        data.torchvision_root("SVHN", "test_32x32.mat", split="test")
    assert str(caught.value) == f"SVHN could not be fetched ({said})"


def test_the_in_distribution_set_is_no_ood_set():
    images = pictures(name="photo_patches")
    assert ood_sets(images, ["photo_patches"], 5, 0)["photo_patches"] == NotAvailable("it is the in-distribution set")


def test_names_and_numbers_are_checked():
    with pytest.raises(ValueError, match="'noise'; there are MNIST"):
        ood_sets(pictures(), ["noise"], 5, seed=0)
    with pytest.raises(ValueError, match="at least one"):
        ood_sets(pictures(), ["uniform"], 0, seed=0)
    with pytest.raises(ValueError, match="two test images"):
        ood_sets(pictures(n=1), ["interpolation"], 5, seed=0)


def test_a_download_is_kept_whole_and_happens_once(tmp_path, monkeypatch):
    calls = []

    def download(command, **_):
        calls.append(command)
        (Path(command[-1]) / "test_32x32.mat").write_bytes(b"whole")

    monkeypatch.setattr(data.subprocess, "run", download)
    for _ in range(2):
        root = data.torchvision_root("SVHN", "test_32x32.mat", split="test")
        assert (root / "test_32x32.mat").read_bytes() == b"whole"
    assert len(calls) == 1 and "datasets.SVHN" in calls[0][2] and "'split': 'test'" in calls[0][2]
    monkeypatch.setattr(data, "writable", lambda _: False)
    with pytest.raises(DataError, match="none of them can be written to"):
        data.torchvision_root("CIFAR100", "cifar-100-python")
