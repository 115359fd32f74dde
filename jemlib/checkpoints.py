"""Checkpoints: written whole or not at all, read without running code."""

from __future__ import annotations

import os
from pathlib import Path

import torch


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used: unreadable, or of another configuration."""


def save_checkpoint(path: Path, state: dict) -> None:
    """Write a checkpoint whole or not at all: aside, flushed to the disk, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def load_checkpoint(path: Path, *, mmap: bool = False) -> dict:
    """Read a checkpoint, running no code from it; CheckpointError where it is damaged. mmap: read on first use."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise CheckpointError(f"{path} cannot be read as a checkpoint ({error}); delete it and run again") from error
