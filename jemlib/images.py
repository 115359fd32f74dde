"""Colour images: CIFAR-10 from wherever it can be had, one's own folders of images, and augmentation."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch
from torch import Tensor

from jemlib import patches
from jemlib.data import DataError, Dataset, Labelled, data_places, split, to_range, torchvision_root
from jemlib.image_files import Decoded, decoded_images
from jemlib.progress import tell
from jemlib.provenance import repo_root

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
STAND_IN = "stand-in: photo patches, not CIFAR-10"
_ARCHIVE = "cifar10-images.tar.xz"


def cifar10(data_dir: str | Path = "", *, n_train: int = 0, n_val: int = 5000, n_test: int = 0) -> Dataset:
    """CIFAR-10 as images (N, 3, 32, 32) float32 in [-1, 1]; its `source` says what they really are.

    Looked for as folders cifar10/{train,test}/<class>/*.png|jpg, as an archive cifar10-images.tar.xz of these, and in
    torchvision's layout; else downloaded. Where nothing serves, the stand-in: crops of ten photographs. data_dir: as
    of `data.mnist`. Sizes of 0 take all. Raises DataError for damaged files and impossible sizes.
    """
    places = data_places(data_dir)
    for place in places:
        for found in (place / "cifar10", place / _ARCHIVE):
            if found.exists():
                decoded = decoded_images(found, 32)
                if decoded.classes != CIFAR10_CLASSES or decoded.test is None:
                    raise DataError(f"{found} does not hold train/ and test/ with the ten classes of CIFAR-10")
                source = "CIFAR-10 (JPEG copy)" if decoded.jpeg else "CIFAR-10"
                return _dataset("CIFAR10", source, decoded, n_train, n_val, n_test)
        if (place / "cifar-10-batches-py").exists():
            return _dataset("CIFAR10", "CIFAR-10", _torchvision(place), n_train, n_val, n_test)
    try:
        root = torchvision_root("CIFAR10", "cifar-10-batches-py", data_dir)
    except DataError as error:
        tell(f"no CIFAR-10: {error}")
        print(f"CIFAR-10 is neither here nor to be downloaded. Going on with the {STAND_IN}.", flush=True)
        return _stand_in(n_train or 20_000, n_val, n_test or 5_000)
    return _dataset("CIFAR10", "CIFAR-10", _torchvision(root), n_train, n_val, n_test)


def image_folder(path: str | Path, *, size: int = 32, n_train: int = 0, n_val: int = 5000, n_test: int = 0) -> Dataset:
    """One's own images, path/{train,test}/<class>/*.png|jpg or path/<class>/*, as (N, 3, size, size) in [-1, 1].

    Images are scaled to the size along their shorter edge and cropped in the middle; transparent ones are laid on
    white. A relative path counts from the repository. Without a folder test/ a fifth of the images is kept for
    testing, always the same ones, and `source` says so. n_train, n_val and n_test are upper limits, 0 takes all;
    validation takes a fifth of the training images at most. Raises DataError.
    """
    folder = (repo_root() / Path(path).expanduser()).resolve()
    decoded = decoded_images(folder, size)
    source = f"own images: {folder.name}"
    if decoded.test is None:
        source += ", a fifth held out for testing"
        train, test = split(*decoded.train, 0, -(-len(decoded.train.y) // 5))
        print(f"{folder.name}: no folder test/, so {len(test.y)} of {len(decoded.train.y)} images are kept for testing")
        decoded = decoded._replace(train=train, test=test)
    n_val, n_wanted = min(n_val, len(decoded.train.y) // 5), n_val
    if n_val < n_wanted:
        print(f"{folder.name}: {n_val} validation images, a fifth of the training images, instead of {n_wanted}")
    name = re.sub(r"[^A-Za-z0-9]+", "_", folder.name).strip("_") or "images"
    n_train = min(n_train, len(decoded.train.y) - n_val)
    return _dataset(name, source, decoded, n_train, n_val, n_test)


def _dataset(name: str, source: str, decoded: Decoded, n_train: int, n_val: int, n_test: int) -> Dataset:
    train, val = split(*decoded.train, n_train, n_val)  # bytes: only what is taken becomes floats
    test = Labelled(*(part[: n_test or None] for part in decoded.test))
    parts = [Labelled(to_range(part.x), part.y.clone()) for part in (train, val, test)]
    return Dataset(name, source, decoded.checksum, decoded.classes, *parts)


def _stand_in(n_train: int, n_val: int, n_test: int) -> Dataset:
    sizes = {"train": n_train, "val": n_val, "test": n_test}
    parts = [Labelled(to_range(x), y) for x, y in (patches.photo_patches(part, n) for part, n in sizes.items())]
    return Dataset("photo_patches", STAND_IN, patches.checksum(), tuple(patches.PHOTOS), *parts)


def _torchvision(root: Path) -> Decoded:
    from torchvision import datasets

    try:
        train, test = (datasets.CIFAR10(str(root), train=part) for part in (True, False))
    except RuntimeError as error:  # torchvision's checksums
        raise DataError(f"{root / 'cifar-10-batches-py'} is damaged or not whole: replace or remove it") from error
    sums = "".join(checksum for _, checksum in datasets.CIFAR10.train_list + datasets.CIFAR10.test_list)
    parts = [Labelled(torch.from_numpy(p.data).permute(0, 3, 1, 2), torch.tensor(p.targets)) for p in (train, test)]
    return Decoded(*parts, CIFAR10_CLASSES, hashlib.sha256(sums.encode()).hexdigest()[:12], False)


def augment(x: Tensor, generator: torch.Generator, pad: int = 4) -> Tensor:
    """Random crops of images (B, C, H, W) padded by reflection, half of them flipped left to right; same shape."""
    batch, channels, height, width = x.shape
    draw = {"generator": generator, "device": x.device}
    top, left = torch.randint(-pad, pad + 1, (2, batch, 1), **draw)
    flip = torch.rand(batch, 1, **draw) < 0.5
    rows = _reflected(top + torch.arange(height, device=x.device), height)
    columns = torch.arange(width, device=x.device)
    columns = _reflected(left + torch.where(flip, columns.flip(0), columns), width)
    image = torch.arange(batch, device=x.device)[:, None, None, None]
    channel = torch.arange(channels, device=x.device)[None, :, None, None]
    return x[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


def _reflected(index: Tensor, n: int) -> Tensor:
    """Indices outside 0..n-1 as a mirror at the first and last element gives them."""
    return (n - 1) - ((n - 1) - index.abs()).abs()
