"""Tests use tiny tensors: one thread is faster than several, and results do not depend on the number of cores.

Nor on a GPU: device "auto" is the CPU here, in the tests' own processes too.
"""

import os
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for one

import matplotlib.pyplot as plt
import pytest
import torch

from jemlib import data, study

torch.set_num_threads(1)

ROW = "what a user gets"  # the name under which a report carries a test's rows


@pytest.fixture(autouse=True)
def no_figure_left_open():
    yield
    plt.close("all")


@pytest.fixture(scope="session")
def smoke(tmp_path_factory):
    """The results folder of the whole chain under the smoke profile."""
    try:
        data.mnist()
    except data.DataError as error:
        pytest.skip(f"data not to be had: {error}")
    out = tmp_path_factory.mktemp("chain") / "smoke"
    assert study.run("smoke", out=out, force=True) == 0
    return out


@pytest.fixture
def gets(request: pytest.FixtureRequest):
    """Note a row: gets(fault, what the user gets, exit code); no code where nothing is a process of its own."""

    def note(fault: str, what: str, code: int | None = None) -> None:
        shown = "-" if code is None else str(code)
        request.node.user_properties.append((ROW, (fault, " ".join(what.split()), shown)))

    return note


def pytest_terminal_summary(terminalreporter) -> None:
    """The table of faults at the end of the output: each fault, the exit code, and what a user gets."""
    reports = [r for kind in ("passed", "failed", "error") for r in terminalreporter.stats.get(kind, [])]
    rows = []
    for report in reports:
        noted = [row for name, row in report.user_properties if name == ROW] if report.when == "call" else []
        rows += [(*row, "FAILS" if report.failed else "holds") for row in noted]
        if report.failed and not noted and "faults" in Path(report.nodeid).parts:
            rows.append((report.nodeid.split("::")[-1], "the test failed, see above", "?", "FAILS"))
    if not rows:
        return
    terminalreporter.section("faults: what a user gets")
    for fault, what, code, holds in [("fault", "what the user gets", "exit", ""), *sorted(rows)]:
        terminalreporter.write_line(f"{holds:<6}{code:>5}  {fault:<58.58}  {what:.220}")
