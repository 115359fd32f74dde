"""Tests use tiny tensors: one thread is faster than several, and results do not depend on the number of cores."""

import torch

torch.set_num_threads(1)
