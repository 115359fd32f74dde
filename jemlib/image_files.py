"""Image files as tensors: folders and archives of train/<class>/*.png|jpg, decoded once and kept in a cache.

A folder of <class>/* alone is read as training images.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from jemlib.checkpoints import CheckpointError, load_checkpoint, save_checkpoint
from jemlib.data import DataError, Labelled, cache_dir, writable
from jemlib.progress import tell

_SUFFIXES = (".png", ".jpg", ".jpeg")
_FORMAT = 1  # of the cache; another decoding or order needs another number


class Decoded(NamedTuple):
    """Images of both parts as bytes (N, 3, S, S), each part in a fixed order that mixes its classes."""

    train: Labelled
    test: Labelled | None
    classes: tuple[str, ...]
    checksum: str
    jpeg: bool  #: whether every file was a JPEG


def decoded_images(source: Path, size: int) -> Decoded:
    """The images of a folder or archive, scaled to a size; read from the cache where the files are still the same.

    A part's images stand in a fixed random order that mixes its classes. Raises DataError, naming the file.
    """
    source = source.resolve()
    try:
        listing = [_stamp(path) for path in ([source] if source.is_file() else _files(source))]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}): repair or remove it") from error
    key = hashlib.sha256(json.dumps([_FORMAT, str(source), size, listing]).encode()).hexdigest()
    if not writable(cache_dir()):
        return _decode_all(source, size)
    place = hashlib.sha256(f"{source}:{size}".encode()).hexdigest()[:12]
    path = cache_dir() / f"images-{place}.pt"
    with FileLock(str(path.with_suffix(".lock"))):
        with contextlib.suppress(CheckpointError):
            state = load_checkpoint(path, mmap=True) if path.exists() else {}
            if state.get("key") == key:
                return _from_state(state)
        tell(f"decoding the images of {source.name} once ...")
        decoded = _decode_all(source, size)
        test = decoded.test or Labelled(None, None)
        state = decoded._asdict() | {"train": tuple(decoded.train), "test": tuple(test), "key": key}
        save_checkpoint(path, state)
    return decoded


def _from_state(state: dict) -> Decoded:
    train, test = (None if part[0] is None else Labelled(*part) for part in (state["train"], state["test"]))
    return Decoded(train, test, state["classes"], state["checksum"], state["jpeg"])


def _stamp(path: Path) -> tuple[str, int, int]:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for ever
        raise DataError(f"{path} cannot be read as an image: it is no regular file; remove it")
    return str(path), found.st_size, found.st_mtime_ns


def _files(folder: Path) -> list[Path]:
    """The image files folder/{train,test}/<class>/*, or folder/<class>/* without train/, in order."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; correct the path of the images")
    if (folder / "train").is_dir():
        parts = [folder / "train", *([folder / "test"] if (folder / "test").is_dir() else [])]
    elif (folder / "test").exists():
        raise DataError(f"{folder} has a folder test/ but no folder train/; move the training images to train/<class>/")
    else:
        parts = [folder]
    labels = [path for part in parts for path in sorted(part.iterdir()) if path.is_dir() and path.name[0] != "."]
    return [path for label in labels for path in sorted(label.iterdir()) if _is_image(path.name)]


def _is_image(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES) and not name.startswith(".")


def _entries(source: Path) -> Iterator[tuple[str, str, str, bytes]]:
    """(part, class, path, content) of every image file; an archive is read in memory, nothing is unpacked."""
    try:
        if source.is_dir():
            for path in _files(source):
                parts = path.relative_to(source).parts
                yield (parts[0] if len(parts) == 3 else "train"), path.parent.name, str(path), path.read_bytes()
            return
        with tarfile.open(source) as archive:
            for member in archive:
                parts = member.name.split("/")[-3:]
                if member.isfile() and len(parts) == 3 and parts[0] in ("train", "test") and _is_image(parts[2]):
                    yield *parts[:2], f"{source}/{member.name}", archive.extractfile(member).read()
    except (OSError, EOFError, tarfile.TarError) as error:
        said = (str(error) or type(error).__name__).splitlines()[0].rstrip(":")
        raise DataError(f"{source} is damaged or cannot be read ({said}): repair or remove it") from error


def _decode_all(source: Path, size: int) -> Decoded:
    parts: dict[str, list[tuple[str, str, Tensor]]] = {"train": [], "test": []}
    sums = {}
    for part, label, path, content in _entries(source):
        name = path.rsplit("/", 1)[-1]
        _check_name(f"{label}/{name}")
        try:
            parts[part].append((label, name, decode(content, size)))
        except Exception as error:  # PIL raises many kinds for a damaged file
            raise DataError(f"{path} cannot be read as an image: replace or remove it") from error
        sums[f"{part}/{label}/{name}"] = hashlib.sha256(content).hexdigest()
    classes = tuple(sorted({label for label, _, _ in parts["train"]}))
    if len(classes) < 2:
        found = f"has images of {classes[0]} alone" if classes else "has no images"
        raise DataError(f"{source} {found}: it needs two classes at least, train/<class>/*.png or <class>/*.png")
    if strange := {label for label, _, _ in parts["test"]} - set(classes):
        raise DataError(f"{source} has test images of classes without training images: {', '.join(sorted(strange))}")
    train, test = (_mixed(part, classes) if part else None for part in parts.values())
    checksum = hashlib.sha256(json.dumps([size, sorted(sums.items())]).encode()).hexdigest()[:12]
    return Decoded(train, test, classes, checksum, not any(file.lower().endswith(".png") for file in sums))


def _check_name(name: str) -> None:
    """Raise DataError for a name that is no UTF-8, which no table or figure could show."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"the file name {name!a} is no UTF-8: rename the file or its folder") from error


def _mixed(part: list[tuple[str, str, Tensor]], classes: tuple[str, ...]) -> Labelled:
    """Files sorted by class in a fixed random order in which every stretch holds each class in its share."""
    part = sorted(part, key=lambda entry: entry[:2])  # an archive may come in any order
    y = np.array([classes.index(label) for label, _, _ in part])
    rng = np.random.default_rng(0)
    place = np.empty(len(y))
    for label in np.unique(y):
        n = int((y == label).sum())
        place[y == label] = (rng.permutation(n) + rng.random(n)) / n
    order = np.argsort(place, kind="stable")
    return Labelled(torch.stack([part[i][2] for i in order]), torch.from_numpy(y[order]))


def decode(content: bytes, size: int) -> Tensor:
    """An image file as RGB bytes (3, size, size): scaled along its shorter edge, cropped in the middle.

    Transparency is laid on white, 16-bit grey keeps its upper bits, a camera's orientation is applied. Raises what
    PIL raises for a file that is no whole image.
    """
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(content)) as image:
        image.draft("RGB", (2 * size, 2 * size))  # a large JPEG is decoded at a fraction of its size
        ImageOps.exif_transpose(image, in_place=True)
        image.load()
    if image.mode.startswith("I"):  # 16 bits, which PIL would clip at 255
        image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    if rgb.size != (size, size):
        rgb = ImageOps.fit(rgb, (size, size), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous()
