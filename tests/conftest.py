"""Tests use tiny tensors: one thread is faster than several, and results do not depend on the number of cores."""

import matplotlib.pyplot as plt
import pytest
import torch

from jemlib import data, study

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_figure_left_open():
    yield
    plt.close("all")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of one run of the chain go first and to one worker: they take longest, and share the run."""
    chain = [item for item in items if "smoke" in item.fixturenames]
    for item in chain:
        item.add_marker(pytest.mark.xdist_group("smoke"))
    items[:] = chain + [item for item in items if item not in chain]


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
