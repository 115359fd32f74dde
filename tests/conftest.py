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
