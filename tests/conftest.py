"""Tests use tiny tensors: one thread is faster than several, and results do not depend on the number of cores."""

import matplotlib.pyplot as plt
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_figure_left_open():
    yield
    plt.close("all")
