"""Out-of-distribution (OOD) sets, each in the shape, range and 8-bit steps of a model's own images."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from jemlib import images
from jemlib.data import DataError, Dataset, mnist, to_range, torchvision_root
from jemlib.patches import photo_patches
from jemlib.progress import tell

_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, what PIL's conversion to grey uses


@dataclass(frozen=True)
class NotAvailable:
    """An OOD set that cannot be had; `reason` is the same on every run."""

    reason: str


#: from (in-distribution set, n, generator, data folder) to bytes (N >= 1, C, H, W), or a reason why there are none
_Maker = Callable[[Dataset, int, torch.Generator, str | Path], "Tensor | NotAvailable"]


def ood_sets(
    dataset: Dataset, names: Sequence[str], n: int, seed: int, data_dir: str | Path = ""
) -> dict[str, Tensor | NotAvailable]:
    """OOD sets for models of `dataset`, by name: float32 (M, C, H, W) in [-1, 1] like its images, M <= n.

    A set that cannot be had is a `NotAvailable`. M < n only where a set has fewer. A set depends on its name, n and
    the seed alone, not on the other names. Raises ValueError for a name that is not in `OOD_SETS`.
    """
    for name in names:
        if name not in OOD_SETS:
            raise ValueError(f"no OOD set is called {name!r}; there are {', '.join(OOD_SETS)}")
    if n < 1:
        raise ValueError(f"an OOD set needs at least one image, not {n}")
    found: dict[str, Tensor | NotAvailable] = {}
    for name in names:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name}:{seed}".encode()))
        if name == dataset.name:
            found[name] = NotAvailable("it is the in-distribution set")
            continue
        pixels = OOD_SETS[name](dataset, n, generator, data_dir)
        found[name] = pixels if isinstance(pixels, NotAvailable) else like(pixels, dataset.test.x)[:n]
    return found


def like(pixels: Tensor, reference: Tensor) -> Tensor:
    """Bytes (N, c, h, w) as images in the channels, size and range of reference images (M, C, H, W) in [-1, 1].

    Colour becomes luma (BT.601), grey is repeated; sizes change by bilinear interpolation, smoothed when shrinking.
    """
    channels, *size = reference.shape[1:]
    x = pixels.float()
    if x.shape[1] == 3 and channels == 1:
        x = (x * torch.tensor(_LUMA)[:, None, None]).sum(1, keepdim=True)
    x = x.expand(-1, channels, -1, -1)
    if list(x.shape[2:]) != size:
        x = F.interpolate(x, size, mode="bilinear", antialias=True, align_corners=False)
    x = to_range(x.round().clamp(0, 255))
    if x.shape[1:] != reference.shape[1:] or x.dtype != reference.dtype or x.min() < -1 or x.max() > 1:
        raise AssertionError("an OOD set left the shape, type or range of the in-distribution images")
    return x


def _draw(x: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """n of the entries of x, without replacement; all of them where there are no more."""
    return x[torch.randperm(len(x), generator=generator)[:n]]


def _bytes(x: Tensor) -> Tensor:
    """Images in [-1, 1] as bytes, the inverse of `data.to_range`."""
    return x.add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)


# --- other data sets ----------------------------------------------------------------------------------------


def _idx(name: str, _: Dataset, n: int, generator: torch.Generator, data_dir: str | Path) -> Tensor | NotAvailable:
    try:
        return _bytes(_draw(mnist(data_dir, name=name, n_train=1).test.x, n, generator))
    except DataError as error:
        tell(f"no {name}: {error}")
        return NotAvailable(f"{name} is neither here nor to be downloaded")


def _cifar10(_: Dataset, n: int, generator: torch.Generator, data_dir: str | Path) -> Tensor | NotAvailable:
    try:
        found = images.cifar10(data_dir, n_train=1, n_val=0)
    except DataError as error:
        tell(f"no CIFAR10: {error}")
        return NotAvailable("CIFAR10 is neither here nor to be downloaded")
    if found.source == images.STAND_IN:
        return NotAvailable("CIFAR10 is neither here nor to be downloaded")
    return _bytes(_draw(found.test.x, n, generator))


def _torchvision(
    name: str, kept: str, options: dict, _: Dataset, n: int, generator: torch.Generator, data_dir: str | Path
) -> Tensor | NotAvailable:
    from torchvision import datasets

    try:
        root = torchvision_root(name, kept, data_dir, **options)
    except DataError as error:
        tell(f"no {name}: {error}")
        return NotAvailable(f"{name} is neither here nor to be downloaded")
    try:
        x = torch.as_tensor(getattr(datasets, name)(str(root), **(options or {"train": False})).data)
    except RuntimeError as error:  # torchvision's checksums
        tell(f"{name}: {error}")
        return NotAvailable(f"the files of {name} are damaged or not whole")
    return _draw(x if x.shape[1] == 3 else x.permute(0, 3, 1, 2), n, generator)


def _photo_patches(dataset: Dataset, n: int, *_: object) -> Tensor:
    return photo_patches("test", n).x


# --- made of noise or of the test images --------------------------------------------------------------------


def _shape(dataset: Dataset, n: int) -> tuple[int, ...]:
    return (n, *dataset.test.x.shape[1:])


def _uniform(dataset: Dataset, n: int, generator: torch.Generator, _: object) -> Tensor:
    return torch.randint(0, 256, _shape(dataset, n), generator=generator, dtype=torch.uint8)


def _gaussian(dataset: Dataset, n: int, generator: torch.Generator, _: object) -> Tensor:
    """N(0, 1/4) on the range [-1, 1], clipped to it."""
    return _bytes(torch.randn(_shape(dataset, n), generator=generator) / 2)


def _constant(dataset: Dataset, n: int, generator: torch.Generator, _: object) -> Tensor:
    """Images of one uniformly drawn colour each."""
    n, channels, height, width = _shape(dataset, n)
    colours = torch.randint(0, 256, (n, channels, 1, 1), generator=generator, dtype=torch.uint8)
    return colours.expand(-1, -1, height, width)


def _interpolation(dataset: Dataset, n: int, generator: torch.Generator, _: object) -> Tensor:
    """Means of two different test images."""
    x, size = dataset.test.x, len(dataset.test.x)
    if size < 2:
        raise ValueError("interpolations need at least two test images")
    first = torch.randint(size, (n,), generator=generator)
    second = (first + torch.randint(1, size, (n,), generator=generator)) % size
    return _bytes((x[first] + x[second]) / 2)


def _shuffled(dataset: Dataset, n: int, generator: torch.Generator, _: object) -> Tensor:
    """Test images whose pixels were permuted, each image in a way of its own, its colours kept."""
    x = _draw(dataset.test.x, n, generator)
    order = torch.rand(len(x), 1, x[0, 0].numel(), generator=generator).argsort(2)
    return _bytes(x.flatten(2).gather(2, order.expand(-1, x.shape[1], -1)).view_as(x))


OOD_SETS: dict[str, _Maker] = {
    "MNIST": partial(_idx, "MNIST"),
    "FashionMNIST": partial(_idx, "FashionMNIST"),
    "CIFAR10": _cifar10,
    "SVHN": partial(_torchvision, "SVHN", "test_32x32.mat", {"split": "test"}),
    "CIFAR100": partial(_torchvision, "CIFAR100", "cifar-100-python", {}),
    "photo_patches": _photo_patches,
    "uniform": _uniform,
    "gaussian": _gaussian,
    "constant": _constant,
    "interpolation": _interpolation,
    "shuffled_pixels": _shuffled,
}
