"""Checkpoints: written whole or not at all, read without running code."""

from __future__ import annotations

import os
from pathlib import Path

import torch


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used: unreadable, or of another configuration."""


def save_checkpoint(path: Path, state: dict) -> None:
    """Write a checkpoint whole or not at all: aside, flushed to the disk, then renamed.

    CheckpointError where it cannot be written; what stood there before stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except (OSError, RuntimeError) as error:
        # torch reports a failed write as an error of its archive's layout, raised while the OSError was handled
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise CheckpointError(
            f"Cannot write {path}: {cause.strerror}; make room and run again, which goes on from the last checkpoint"
        ) from error
    finally:
        aside.unlink(missing_ok=True)


def load_checkpoint(path: Path, *, mmap: bool = False) -> dict:
    """Read a checkpoint, running no code from it; CheckpointError where it is damaged. mmap: read on first use."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch raises many kinds for a damaged file, some of them over many lines
        said = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise CheckpointError(f"{path} cannot be read as a checkpoint ({said[0]}); delete it and run again") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} cannot be read as a checkpoint (it is none); delete it and run again")
    return state
