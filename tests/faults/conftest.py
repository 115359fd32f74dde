"""What every test of faults starts from."""

from __future__ import annotations

from pathlib import Path

import program
import pytest


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the program, as of `program.copy`."""
    return program.copy(tmp_path)
