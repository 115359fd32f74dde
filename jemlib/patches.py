"""Photo patches: colour crops of ten photographs that ship with pinned packages, a data set that needs no network."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from jemlib.data import DataError, Labelled

#: class -> the package that ships the photograph, and the file in it
PHOTOS = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "cat": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "hubble": ("skimage", "data/hubble_deep_field.jpg"),
    "tissue": ("skimage", "data/ihc.png"),
    "retina": ("skimage", "data/retina.jpg"),
    "rocket": ("skimage", "data/rocket.jpg"),
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "china": ("sklearn", "datasets/images/china.jpg"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
}
SIZE = 32  #: pixels along a crop's edge
_BLOCK = 2 * SIZE  # a crop lies inside one block, and a block belongs to one part: parts share no pixel
_SHORT_EDGE = 6 * _BLOCK  # larger photographs are shrunk, else a crop of them is one flat colour
_PARTS = {"train": (1, 2, 3, 4, 6, 7, 9), "val": (8,), "test": (0, 5)}  # of ten kinds of blocks


def photo_patches(part: str, n: int) -> Labelled:
    """The first n crops of "train", "val" or "test": bytes (n, 3, 32, 32) and labels (n,), classes in turn.

    The three parts come from disjoint regions of each photograph. The same n always gives the same crops, and a
    larger n goes on from there.
    """
    rng = np.random.default_rng(list(_PARTS).index(part))
    draws = rng.random((n, 3))
    y = np.arange(n) % len(PHOTOS)
    x = np.empty((n, 3, SIZE, SIZE), np.uint8)
    for label, name in enumerate(PHOTOS):
        photo = _photo(name)
        mine = draws[y == label]
        blocks = _blocks(photo.shape[0], photo.shape[1], part)
        corner = blocks[(mine[:, 0] * len(blocks)).astype(int)]
        top, left = (corner + (mine[:, 1:] * (_BLOCK - SIZE + 1)).astype(int)).T
        x[y == label] = sliding_window_view(photo, (SIZE, SIZE), axis=(0, 1))[top, left]
    return Labelled(torch.from_numpy(x), torch.from_numpy(y))


@cache
def checksum() -> str:
    """Twelve hex digits of the ten files."""
    return hashlib.sha256(b"".join(_path(name).read_bytes() for name in PHOTOS)).hexdigest()[:12]


@cache
def _photo(name: str) -> np.ndarray:
    """A photograph as bytes (H, W, 3), its shorter edge at most _SHORT_EDGE."""
    from PIL import Image

    with Image.open(_path(name)) as image:
        photo = image.convert("RGB")
    scale = _SHORT_EDGE / min(photo.size)
    if scale < 1:
        size = [round(edge * scale) for edge in photo.size]
        photo = photo.resize(size, Image.Resampling.LANCZOS)
    return np.asarray(photo)


def _path(name: str) -> Path:
    package, file = PHOTOS[name]
    spec = find_spec(package)
    path = None if spec is None else Path(spec.submodule_search_locations[0], file)
    if path is None or not path.is_file():
        raise DataError(f"the photograph {file} of the package {package} is missing; install the pinned environment")
    return path


def _blocks(height: int, width: int, part: str) -> np.ndarray:
    """Upper left corners (M, 2) of a part's blocks, spread over a photograph."""
    rows, columns = np.indices((height // _BLOCK, width // _BLOCK))
    mine = np.isin((3 * rows + columns) % 10, _PARTS[part])
    return np.stack([rows[mine], columns[mine]], axis=1) * _BLOCK
