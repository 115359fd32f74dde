"""What ran where: the commit, the versions and the machine that a run record names."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jemlib

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "pandas", "matplotlib", "papermill")


def repo_root() -> Path:
    """The folder that holds `jemlib/`, `notebooks/` and `results/`."""
    return Path(__file__).resolve().parent.parent


def provenance(device: torch.device | None = None) -> dict[str, Any]:
    """What ran where: commit, dirty flag, versions, device (None: the best there is), threads, CPU, platform.

    `commit` and `dirty` are None outside a git checkout of this very folder.
    """
    import torch

    kind = device.type if device else "cuda" if torch.cuda.is_available() else "cpu"
    return {
        **git_state(),
        "versions": {"python": platform.python_version(), "jemlib": jemlib.__version__, **_versions()},
        "device": torch.cuda.get_device_name(device) if kind == "cuda" else kind,
        "threads": torch.get_num_threads(),
        "cpu": _cpu_model(),
        "platform": platform.platform(),
    }


def git_state() -> dict[str, Any]:
    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=repo_root(), capture_output=True, text=True, timeout=30, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    # A copy unpacked inside somebody else's repository must not report that repository's commit.
    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != repo_root():
        return {"commit": None, "dirty": None}
    # what a run writes to results/ does not change what it computes
    changes = git("status", "--porcelain", "--", ".", ":!results")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()
