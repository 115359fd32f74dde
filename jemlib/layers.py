"""Two layers of torch's, the same function, that cost less where a sampler asks for the gradient of the input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Conv2d(nn.Conv2d):
    """torch's convolution. On a CPU, with channels_last and frozen weights, its input gradient is found otherwise.

    At stride 1 that gradient is the convolution of dL/dy with the kernel turned by 180 degrees and its channels
    swapped: oneDNN has faster kernels for it than for the input gradient, and they round alike.
    At other strides it is a transposed convolution, which oneDNN computes as autograd would, in less time.
    At any stride the input itself is not kept, which only a gradient of the weights would need.
    """

    def forward(self, x: Tensor) -> Tensor:
        sampling = torch.is_grad_enabled() and x.requires_grad and not self.weight.requires_grad
        if sampling and x.device.type == "cpu" and x.dim() == 4 and self._usual():
            return _FrozenConv.apply(x, self.weight, self.bias, self.stride, self.padding)
        return super().forward(x)

    def _usual(self) -> bool:
        """Whether it is a convolution as `_FrozenConv` differentiates it: without dilation, groups, other padding."""
        return (
            self.weight.is_contiguous(memory_format=torch.channels_last)
            and (self.dilation, self.groups, self.padding_mode) == ((1, 1), 1, "zeros")
            and not isinstance(self.padding, str)
            and all(p < k for p, k in zip(self.padding, self.kernel_size, strict=True))
        )


class _FrozenConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple, padding: tuple) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.stride, ctx.padding = x.shape, stride, padding
        return F.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (weight,) = ctx.saved_tensors
        sizes = list(zip(ctx.shape[2:], grad.shape[2:], weight.shape[2:], ctx.stride, ctx.padding, strict=True))
        if ctx.stride == (1, 1):
            turned = weight.flip(2, 3).transpose(0, 1).contiguous(memory_format=torch.channels_last)
            of_input = F.conv2d(grad, turned, padding=[k - 1 - p for _, _, k, _, p in sizes])
        else:  # the same kernel as autograd's, in the layout of `grad`
            rest = [n - ((m - 1) * s - 2 * p + k) for n, m, k, s, p in sizes]
            of_input = F.conv_transpose2d(grad, weight, stride=ctx.stride, padding=ctx.padding, output_padding=rest)
        return of_input, None, None, None, None


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
