"""The table at the end of the tests' output: each fault, what a user gets, and the exit code."""

from __future__ import annotations

from pathlib import Path

import program
import pytest

ROWS = pytest.StashKey[list[tuple[str, str, str, str]]]()
HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


@pytest.fixture
def gets(request: pytest.FixtureRequest):
    """Note a row: gets(fault, what the user gets, exit code); no code where nothing is a process of its own."""

    def note(fault: str, what: str, code: int | None = None) -> None:
        shown = "-" if code is None else str(code)
        request.config.stash[ROWS].append((request.node.nodeid, fault, " ".join(what.split()), shown))

    return note


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the program, as of `program.copy`."""
    return program.copy(tmp_path)


def pytest_terminal_summary(terminalreporter, exitstatus: int, config: pytest.Config) -> None:
    stats = terminalreporter.stats
    here = [r for kind in ("failed", "error") for r in stats.get(kind, []) if HERE.name in Path(r.nodeid).parts]
    bad = {report.nodeid for report in here}
    rows = [(*row[1:], "FAILS" if row[0] in bad else "holds") for row in config.stash[ROWS]]
    noted = {row[0] for row in config.stash[ROWS]}
    rows += [(nodeid.split("::")[-1], "the test failed, see above", "?", "FAILS") for nodeid in sorted(bad - noted)]
    if not rows:
        return
    terminalreporter.section("faults: what a user gets")
    for fault, what, code, holds in [("fault", "what the user gets", "exit", ""), *rows]:
        terminalreporter.write_line(f"{holds:<6}{code:>5}  {fault:<58.58}  {what:.220}")
