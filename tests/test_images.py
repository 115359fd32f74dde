"""Images: where CIFAR-10 comes from, one's own folders, photo patches, augmentation, and the wide residual net."""

import io
import os
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from jemlib import data, image_files, images, nets, patches
from jemlib.config import TrainConfig
from jemlib.data import DataError
from jemlib.energy import JEM
from jemlib.image_files import decode
from jemlib.sampler import sgld
from jemlib.training import build_model, fit

DATA, REPO = os.environ.get("JEMLIB_DATA", ""), data.repo_root()
CLASSES = ("apple", "pear", "plum")


@pytest.fixture(autouse=True)
def closed(tmp_path, monkeypatch):
    """A repository cache of the test's own, no data folder of the user's, no network."""
    monkeypatch.setattr(data, "repo_root", lambda: tmp_path / "repository")
    monkeypatch.delenv("JEMLIB_DATA", raising=False)
    monkeypatch.setattr(data.subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(OSError("no network")))


def write(folder, classes=CLASSES, n=40, kind="png", size=32, seed=0):
    """n noisy images a class, whose red channel tells the class."""
    rng = np.random.default_rng(seed)
    for k, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(n):
            pixels = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
            pixels[..., 0] = 20 * k
            Image.fromarray(pixels).save(folder / name / f"{i:04d}.{kind}", quality=95)
    return folder


@pytest.fixture
def own(tmp_path):
    write(tmp_path / "fruit" / "train")
    return tmp_path / "fruit"


def encoded(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


# --- one's own images ---------------------------------------------------------------------------------------


def test_own_images_train(own, capsys):
    found = images.image_folder(own)
    said = capsys.readouterr().out
    assert "24 of 120 images are kept for testing" in said and "19 validation images" in said
    assert found.source == "own images: fruit, a fifth held out for testing"
    assert found.name == "fruit" and found.classes == CLASSES
    assert [len(part.x) for part in (found.train, found.val, found.test)] == [77, 19, 24]
    assert found.train.x.shape[1:] == (3, 32, 32) and found.train.x.dtype == torch.float32
    assert -1 <= found.train.x.min() < found.train.x.max() <= 1
    for part in (found.train, found.val, found.test):
        red = part.x[:, 0].mean((1, 2))
        assert torch.allclose(red, 20 * part.y / 127.5 - 1), "an image keeps its label"
        assert torch.bincount(part.y, minlength=3).min() >= len(part.y) // 3 - 1, "each part holds every class"
    options = {
        "network": "wide_resnet",
        "depth": 10,
        "width": 1,
        "n_iterations": 2,
        "batch_size": 8,
        "n_steps": 1,
        "buffer_size": 8,
    }
    config = TrainConfig(method="st_jem", augment="classifier", noise_std=0.01, **options)
    assert fit(config, found.train, len(found.classes)).status == "ok"


def test_parts_do_not_overlap_and_the_order_is_fixed(own, monkeypatch):
    found = images.image_folder(own)
    keys = [{image.numpy().tobytes() for image in part.x} for part in (found.train, found.val, found.test)]
    assert len(set.union(*keys)) == 120
    again = images.image_folder(own)
    assert all(torch.equal(a.x, b.x) for a, b in [(found.train, again.train), (found.test, again.test)])
    small = images.image_folder(own, n_train=10, n_test=5)
    assert torch.equal(small.train.x, found.train.x[:10]) and torch.equal(small.val.x, found.val.x)
    assert small.id != found.id and small.checksum == found.checksum


def test_a_test_folder_is_used(own):
    write(own / "test", n=4, seed=1)
    found = images.image_folder(own)
    assert found.source == "own images: fruit"
    assert len(found.test.x) == 12 and len(found.train.x) + len(found.val.x) == 120


def test_classes_alone_give_the_same_images(own):
    inside, alone = images.image_folder(own), images.image_folder(own / "train")
    assert alone.checksum == inside.checksum and torch.equal(alone.test.x, inside.test.x)
    assert alone.source == "own images: train, a fifth held out for testing"


def test_images_are_decoded_once_and_again_where_they_changed(own, monkeypatch, capsys):
    first = images.image_folder(own)
    monkeypatch.setattr(image_files, "decode", lambda *_: pytest.fail("the cache was not used"))
    assert torch.equal(images.image_folder(own).train.x, first.train.x)
    monkeypatch.undo()
    monkeypatch.setattr(data, "repo_root", lambda: own.parent / "repository")
    Image.new("RGB", (32, 32)).save(own / "train" / "pear" / "0000.png")
    changed = images.image_folder(own)
    assert changed.checksum != first.checksum and not torch.equal(changed.train.x, first.train.x)
    kept = [path.name for path in data.cache_dir().iterdir() if path.suffix == ".pt"]
    assert len(kept) == 1, "the new cache takes the old one's place"
    Path(data.cache_dir(), kept[0]).write_bytes(b"cut short")
    assert torch.equal(images.image_folder(own).train.x, changed.train.x), "a damaged cache is made again"


def test_a_folder_without_a_place_for_the_cache(own, monkeypatch):
    monkeypatch.setattr(image_files, "writable", lambda _: False)
    assert len(images.image_folder(own).test.x) == 24
    assert not data.cache_dir().exists()


@pytest.mark.parametrize("damage", ["empty", "cut", "text"])
@pytest.mark.parametrize("kind", ["png", "jpg"])
def test_a_damaged_file_is_named(tmp_path, damage, kind):
    folder = write(tmp_path / "photos" / "train", n=3, kind=kind)
    path = folder / "plum" / f"0001.{kind}"
    content = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "text": b"<html>no</html>"}[damage])
    with pytest.raises(DataError, match=rf"plum/0001.{kind} cannot be read as an image"):
        images.image_folder(tmp_path / "photos")


def test_folders_that_are_no_data_set_are_refused(tmp_path, own):
    with pytest.raises(DataError, match="there is no folder"):
        images.image_folder(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no folder train/"):
        write(tmp_path / "half" / "test", n=2)
        images.image_folder(tmp_path / "half")
    with pytest.raises(DataError, match="images of only alone"):
        write(tmp_path / "one" / "train", classes=("only",), n=2)
        images.image_folder(tmp_path / "one")
    write(own / "test", classes=("pear", "quince"), n=2)
    with pytest.raises(DataError, match="quince"):
        images.image_folder(own)


# --- decoding -----------------------------------------------------------------------------------------------


def test_16_bit_grey_keeps_its_upper_bits():
    ramp = np.linspace(0, 65535, 32 * 32).round().astype(np.uint16).reshape(32, 32)
    pixels = decode(encoded(Image.fromarray(ramp)), 32)
    assert torch.equal(pixels[0], torch.from_numpy((ramp // 257).astype(np.uint8)))
    assert torch.equal(pixels[0], pixels[1]) and torch.equal(pixels[0], pixels[2])


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_laid_on_white(mode):
    image = Image.new("RGBA", (32, 32), (255, 0, 0, 255) if mode != "LA" else (0, 0, 0, 255))
    image.paste((0, 0, 255, 0), (0, 0, 16, 32))
    if mode == "P":
        image = image.quantize(4)
    pixels = decode(encoded(image.convert(mode) if mode != "P" else image), 32)
    assert (pixels[:, :, :16] == 255).all(), "the hidden blue does not show"
    assert pixels[:, 0, 20].tolist() == ([0, 0, 0] if mode == "LA" else [255, 0, 0])


def test_grey_cmyk_and_black_and_white():
    grey = Image.fromarray(np.arange(1024, dtype=np.uint8).reshape(32, 32))
    assert torch.equal(decode(encoded(grey), 32)[2], torch.from_numpy(np.array(grey)))
    assert decode(encoded(grey, "JPEG"), 32).shape == (3, 32, 32)
    assert decode(encoded(Image.new("CMYK", (32, 32), (0, 255, 255, 0)), "JPEG"), 32)[0].min() > 200
    assert decode(encoded(Image.new("1", (32, 32), 1)), 32).min() == 255


def test_other_sizes_are_scaled_and_cropped_in_the_middle():
    wide = Image.new("RGB", (300, 100), "red")
    wide.paste("blue", (100, 0, 200, 100))
    assert (decode(encoded(wide), 32)[2] > 235).all(), "the middle square is blue"
    assert (decode(encoded(wide, "JPEG", quality=95), 32)[2] > 225).all()
    tall = Image.new("RGB", (8, 16), "green")
    assert decode(encoded(tall), 32).shape == (3, 32, 32)


def test_a_cameras_orientation_is_applied():
    image = Image.new("L", (32, 32))
    image.paste(255, (0, 0, 32, 16))  # the upper half is white
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180 degrees
    for kind in ("JPEG", "PNG"):
        pixels = decode(encoded(image, kind, exif=exif.tobytes()), 32)[0].float()
        assert pixels[:16].mean() < 20 < 230 < pixels[16:].mean()


# --- CIFAR-10 from wherever it is ---------------------------------------------------------------------------


@pytest.fixture
def cifar_folder(tmp_path):
    for part in ("train", "test"):
        write(tmp_path / "data" / "cifar10" / part, images.CIFAR10_CLASSES, n=6, kind="jpg", seed=len(part))
    return tmp_path / "data"


def test_a_folder_and_its_archive_are_one_data_set(cifar_folder, tmp_path):
    folder = images.cifar10(cifar_folder, n_val=10)
    assert folder.source == "CIFAR-10 (JPEG copy)" and folder.name == "CIFAR10"
    assert [len(part.x) for part in (folder.train, folder.val, folder.test)] == [50, 10, 60]
    assert torch.bincount(folder.val.y, minlength=10).max() <= 3, "validation is not one class"
    packed = tmp_path / "packed"
    packed.mkdir()
    with tarfile.open(packed / "cifar10-images.tar.xz", "w:xz") as archive:
        archive.add(cifar_folder / "cifar10", "cifar10")
    packed.chmod(0o555)
    found = images.cifar10(packed, n_val=10)
    packed.chmod(0o755)
    assert found.id == folder.id and torch.equal(found.train.x, folder.train.x)
    assert sorted(path.name for path in packed.iterdir()) == ["cifar10-images.tar.xz"], "nothing is unpacked there"
    (packed / "cifar10-images.tar.xz").write_bytes((packed / "cifar10-images.tar.xz").read_bytes()[:-500])
    with pytest.raises(DataError, match=r"cifar10-images.tar.xz is damaged or cannot be read"):
        images.cifar10(packed)


def test_other_folders_are_not_called_cifar(cifar_folder):
    shutil.rmtree(cifar_folder / "cifar10" / "test")
    with pytest.raises(DataError, match="does not hold"):
        images.cifar10(cifar_folder)
    shutil.rmtree(cifar_folder / "cifar10")
    write(cifar_folder / "cifar10" / "train", n=2)
    write(cifar_folder / "cifar10" / "test", n=2)
    with pytest.raises(DataError, match="ten classes"):
        images.cifar10(cifar_folder)


def test_torchvisions_files_are_checked(tmp_path):
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    (folder / "data_batch_1").write_bytes(pickle.dumps({}))
    with pytest.raises(DataError, match="damaged or not whole"):
        images.cifar10(tmp_path / "data")


def test_without_cifar_a_stand_in_says_what_it_is(monkeypatch, capsys):
    monkeypatch.setenv("JPY_SESSION_NAME", "a person watches")  # who is told why, too
    found = images.cifar10(n_train=500, n_val=100, n_test=200)
    assert found.source == "stand-in: photo patches, not CIFAR-10" and found.name == "photo_patches"
    said = capsys.readouterr().out
    assert "no network" in said and "stand-in: photo patches, not CIFAR-10" in said
    assert [len(part.x) for part in (found.train, found.val, found.test)] == [500, 100, 200]
    assert len(found.classes) == 10 and torch.bincount(found.train.y).tolist() == [50] * 10
    images.cifar10(n_train=500, n_val=100, n_test=200)
    assert "within the last hour" in capsys.readouterr().out, "a failed download is not repeated at once"
    monkeypatch.delenv("JPY_SESSION_NAME")
    images.cifar10(n_train=500, n_val=100, n_test=200)
    assert "hour" not in capsys.readouterr().out, "an executed copy does not depend on what was tried before it"


@pytest.mark.skipif(not Path(DATA, "cifar10-images.tar.xz").is_file(), reason="JEMLIB_DATA has no CIFAR-10 archive")
def test_the_jpeg_copy_is_whole(monkeypatch):
    monkeypatch.setattr(data, "repo_root", lambda: REPO)  # its cache: decoding takes a while
    found = images.cifar10(DATA, n_train=1000)
    assert found.source == "CIFAR-10 (JPEG copy)" and found.classes == images.CIFAR10_CLASSES
    assert torch.bincount(found.train.y).tolist() == [100] * 10
    assert torch.bincount(found.val.y).tolist() == [500] * 10
    assert torch.bincount(found.test.y).tolist() == [1000] * 10
    assert found.train.x.min() == -1 and found.train.x.max() == 1
    statistics = found.train.x.add(1).div(2).mean((0, 2, 3))
    assert torch.allclose(statistics, torch.tensor([0.491, 0.482, 0.447]), atol=0.015), "CIFAR-10's means by channel"


# --- photo patches ------------------------------------------------------------------------------------------


def test_patches_of_different_parts_share_no_pixel():
    for name in patches.PHOTOS:
        height, width, _ = patches._photo(name).shape
        owner = np.zeros((height, width), int)
        for part in ("train", "val", "test"):
            blocks = patches._blocks(height, width, part)
            assert len(blocks), f"{name} has no region for {part}"
            for top, left in blocks:
                owner[top : top + 64, left : left + 64] += 1
        assert owner.max() == 1
        assert height >= 64 and width >= 64


def test_patches_lie_inside_their_blocks_and_are_stable():
    few, many = patches.photo_patches("test", 40), patches.photo_patches("test", 400)
    assert torch.equal(few.x, many.x[:40]) and torch.equal(few.y, many.y[:40])
    assert many.x.dtype == torch.uint8 and many.x.shape == (400, 3, 32, 32)
    photo = torch.from_numpy(patches._photo("china").copy()).permute(2, 0, 1)
    regions = [photo[:, top : top + 64, left : left + 64] for top, left in patches._blocks(*photo.shape[1:], "test")]
    windows = torch.cat([region.unfold(1, 32, 1).unfold(2, 32, 1).flatten(1, 2) for region in regions], 1)
    label = list(patches.PHOTOS).index("china")
    for crop in many.x[many.y == label][:5]:
        assert (windows == crop[:, None]).flatten(2).all(2).all(0).any()


# --- augmentation -------------------------------------------------------------------------------------------


def test_augmentation_equals_padding_and_cropping_one_by_one():
    x = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    found = images.augment(x, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    top, left = torch.randint(-4, 5, (2, 64, 1), generator=generator)
    flip = torch.rand(64, 1, generator=generator) < 0.5
    for i in range(64):
        padded = F.pad(x[i], (4, 4, 4, 4), mode="reflect")
        r, c = 4 + top[i, 0], 4 + left[i, 0]
        crop = padded[:, r : r + 32, c : c + 32]
        assert torch.equal(found[i], crop.flip(2) if flip[i, 0] else crop)
    assert 16 < flip.sum() < 48 and set(top.flatten().tolist()) == set(range(-4, 5))
    assert not torch.equal(found, images.augment(x, torch.Generator().manual_seed(2)))


def test_augmentation_leaves_its_input_alone_and_takes_any_shape():
    x = torch.rand(5, 1, 28, 20)
    before = x.clone()
    assert images.augment(x, torch.Generator().manual_seed(0)).shape == x.shape
    assert torch.equal(x, before)


# --- the wide residual net ----------------------------------------------------------------------------------


def test_wrn_28_10_has_the_published_number_of_parameters():
    with torch.device("meta"):
        net = nets.wide_resnet(10, depth=28, width=10)
    assert round(sum(p.numel() for p in net.parameters()) / 1e6, 1) == 36.5
    assert isinstance(net[-1], torch.nn.Linear) and net[-1].in_features == 640
    assert len([m for m in net.modules() if isinstance(m, torch.nn.Conv2d)]) == 28
    assert not [m for m in net.modules() if isinstance(m, torch.nn.modules.batchnorm._NormBase)]


@pytest.mark.parametrize("size", [32, 28, 64])
def test_a_wide_resnet_takes_images_of_several_sizes(size):
    config = TrainConfig(method="softmax", network="wide_resnet", depth=10, width=1, n_iterations=1)
    model = build_model(config, (3, size, size), 7)
    x = torch.rand(4, 3, size, size) * 2 - 1
    assert model.logits(x).shape == (4, 7) and model.backbone[:-1](x).shape == (4, 64)
    assert torch.equal(model.logits(x), build_model(config, (3, size, size), 7).logits(x)), "the seed makes the net"


def test_an_image_of_a_wide_resnet_is_by_itself():
    torch.manual_seed(0)
    net = nets.wide_resnet(10, width=1)
    x = torch.rand(6, 3, 32, 32) * 2 - 1
    one_by_one = torch.cat([net(image[None]) for image in x])
    assert torch.allclose(net(x), one_by_one, atol=1e-5)
    moved, _ = sgld(JEM(net), x, n_steps=2, step_size=1.0, noise_std=0.0, generator=torch.Generator())
    assert moved.shape == x.shape and torch.isfinite(moved).all() and not torch.equal(moved, x)


def test_what_a_wide_resnet_refuses():
    with pytest.raises(ValueError, match="norm='batch'"):
        nets.wide_resnet(10, norm="batch")
    with pytest.raises(ValueError, match="6n \\+ 4"):
        nets.wide_resnet(10, depth=12)
    with pytest.raises(ValueError, match="6n \\+ 4"):
        nets.wide_resnet(10, depth=4)
