"""The table at the end of the tests' output: each fault, what a user gets, and the exit code."""

from __future__ import annotations

from pathlib import Path

import program
import pytest

ROW = "what a user gets"  # the name under which a test's report carries its rows, from whichever worker ran it
HERE = Path(__file__).parent


@pytest.fixture
def gets(request: pytest.FixtureRequest):
    """Note a row: gets(fault, what the user gets, exit code); no code where nothing is a process of its own."""

    def note(fault: str, what: str, code: int | None = None) -> None:
        shown = "-" if code is None else str(code)
        request.node.user_properties.append((ROW, (fault, " ".join(what.split()), shown)))

    return note


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the program, as of `program.copy`."""
    return program.copy(tmp_path)


def pytest_terminal_summary(terminalreporter) -> None:
    reports = [r for kind in ("passed", "failed", "error") for r in terminalreporter.stats.get(kind, [])]
    rows = []
    for report in reports:
        noted = [row for name, row in report.user_properties if name == ROW] if report.when == "call" else []
        rows += [(*row, "FAILS" if report.failed else "holds") for row in noted]
        if report.failed and not noted and HERE.name in Path(report.nodeid).parts:
            rows.append((report.nodeid.split("::")[-1], "the test failed, see above", "?", "FAILS"))
    if not rows:
        return
    terminalreporter.section("faults: what a user gets")
    for fault, what, code, holds in [("fault", "what the user gets", "exit", ""), *sorted(rows)]:
        terminalreporter.write_line(f"{holds:<6}{code:>5}  {fault:<58.58}  {what:.220}")
