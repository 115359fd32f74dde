"""A layer of torch's, the same function, that needs less memory in training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LeakyReLU(nn.Module):
    """max(x, slope x) for a slope in (0, 1), which keeps its output for the backward pass and not its input.

    In training the convolution that follows keeps that tensor anyway, so a residual block holds two tensors less.
    """

    def __init__(self, slope: float):
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return _LeakyReLU.apply(x, self.slope)


class _LeakyReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, slope: float) -> Tensor:
        y = F.leaky_relu(x, slope)
        ctx.save_for_backward(y)  # of the same sign as x
        ctx.slope = slope
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.leaky_relu_backward(grad, y, ctx.slope, True), None
