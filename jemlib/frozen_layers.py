"""The layers of `nets` with frozen weights: y from x, and dL/dx from dL/dy, by hand.

In the order in which `nets` puts them nobody overwrites what another keeps.
"""

from __future__ import annotations

import functools
import math
import platform
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jemlib import nets
from jemlib.layers import LeakyReLU


class Layer(Protocol):
    """One layer: `forward` gives y and what `backward` needs to make dL/dx of dL/dy.

    Both may overwrite what they are given, except for the first layer's x, which is the caller's.
    """

    def refresh(self) -> None: ...
    def forward(self, x: Tensor) -> tuple[Tensor, Any]: ...
    def backward(self, grad: Tensor, kept: Any) -> Tensor: ...


class _Simple:
    """A layer without weights."""

    def __init__(self, module: nn.Module):
        self.module = module

    def refresh(self) -> None:
        pass


class _Scale(_Simple):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x * self.module.factor, None

    def backward(self, grad: Tensor, kept: None) -> Tensor:
        return grad * self.module.factor


class _SiLU(_Simple):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.silu(x), x

    def backward(self, grad: Tensor, x: Tensor) -> Tensor:
        return torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=x)


class _LeakyReLU(_Simple):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.leaky_relu_(x, self.module.slope)
        return y, y

    def backward(self, grad: Tensor, y: Tensor) -> Tensor:
        return _leaky_backward(grad, y, self.module.slope, grad)


class _Unshuffle(_Simple):
    """PixelUnshuffle(2) into channels_last and back. Two neighbours of a row stay so: they are moved as one number."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        b, c, h, w = x.shape
        pairs = x.reshape(-1).view(_PAIR[x.dtype]).view(b, c, h // 2, 2, w // 2).permute(0, 2, 4, 1, 3)
        return pairs.reshape(-1).view(x.dtype).view(b, h // 2, w // 2, 4 * c).permute(0, 3, 1, 2), None

    def backward(self, grad: Tensor, kept: None) -> Tensor:
        b, c, h, w = grad.shape
        pairs = grad.permute(0, 2, 3, 1).reshape(-1).view(_PAIR[grad.dtype]).view(b, h, w, c // 4, 2)
        return pairs.permute(0, 3, 1, 4, 2).reshape(-1).view(grad.dtype).view(b, c // 4, 2 * h, 2 * w)


_PAIR = {torch.bfloat16: torch.int32, torch.float32: torch.int64}


class _Flatten(_Simple):
    """In the order of channels_last, so that nothing is copied; the `_Linear` that follows knows of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, torch.Size]:
        return x.permute(0, 2, 3, 1).flatten(1), x.shape

    def backward(self, grad: Tensor, shape: torch.Size) -> Tensor:
        b, c, h, w = shape
        return grad.view(b, h, w, c).permute(0, 3, 1, 2)


class _Average(_Simple):
    """AdaptiveAvgPool2d(1)."""

    def forward(self, x: Tensor) -> tuple[Tensor, torch.Size]:
        return x.mean((2, 3), keepdim=True), x.shape

    def backward(self, grad: Tensor, shape: torch.Size) -> Tensor:
        whole = torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
        return whole.copy_(grad / math.prod(shape[2:]))


class _Linear:
    """channels: of what a `_Flatten` before it has put last, where the module expects them first."""

    def __init__(self, module: nn.Linear, dtype: torch.dtype, channels: int):
        self.module, self.channels = module, channels
        self.weight = torch.empty_like(module.weight, dtype=dtype)
        self.bias = torch.empty_like(module.bias, dtype=dtype)

    def refresh(self) -> None:
        outputs, inputs = self.weight.shape
        last = self.module.weight.view(outputs, self.channels, inputs // self.channels).transpose(1, 2)
        self.weight.view(last.shape).copy_(last)
        self.bias.copy_(self.module.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, torch.dtype]:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias), x.dtype

    def backward(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        return (grad @ self.weight).to(dtype)


class _Conv:
    """A convolution, with the activation or the sum that follows it."""

    def __init__(self, module: nn.Conv2d, dtype: torch.dtype):
        self.module = module
        self.stride, self.padding, self.kernel = module.stride, module.padding, module.kernel_size
        weight = module.weight.detach()
        form = {"dtype": dtype, "memory_format": torch.channels_last}
        self.weight, self.turned = torch.empty_like(weight, **form), torch.empty_like(weight.transpose(0, 1), **form)
        self.bias = torch.empty_like(module.bias, dtype=dtype)
        self.packed: dict[tuple[str, int], Tensor] = {}  #: what of, and for how many inputs

    def refresh(self) -> None:
        self.weight.copy_(self.module.weight)
        self.turned.copy_(self.weight.flip(2, 3).transpose(0, 1))
        self.bias.copy_(self.module.bias)
        self.packed.clear()

    def forward(self, x: Tensor, *, slope: float | None = None, to: Tensor | None = None) -> tuple[Tensor, torch.Size]:
        """The convolution; with a slope leaky ReLU of it; with `to` added to that tensor in place."""
        return self._run("weight", x, self.bias, self.stride, self.padding, slope, to), x.shape

    def backward(self, grad: Tensor, shape: torch.Size, *, to: Tensor | None = None) -> Tensor:
        """dL/dx, or that added to `to`.

        At stride 1 it is the convolution of dL/dy with the kernel turned by 180 degrees and its channels swapped:
        oneDNN has faster kernels for it than for the input gradient. At other strides it is a transposed convolution.
        """
        inner = [k - 1 - p for k, p in zip(self.kernel, self.padding, strict=True)]
        if self.stride == (1, 1):
            return self._run("turned", grad, None, self.stride, inner, None, to)
        if self.kernel == (1, 1) and to is not None:  # between the pixels that it has seen, nothing is added
            to[:, :, :: self.stride[0], :: self.stride[1]] += self._run("turned", grad, None, (1, 1), inner, None, None)
            return to
        sizes = zip(shape[2:], grad.shape[2:], self.kernel, self.stride, self.padding, strict=True)
        rest = [n - ((m - 1) * s - 2 * p + k) for n, m, k, s, p in sizes]
        options = {"stride": self.stride, "padding": self.padding, "output_padding": rest}
        found = F.conv_transpose2d(grad, self.weight, **options)
        return found if to is None else to.add_(found)

    def _run(self, which: str, x: Tensor, bias, stride, padding, slope: float | None, to: Tensor | None) -> Tensor:
        weight = getattr(self, which)
        if not _fuses(x.device.type, x.dtype):
            y = F.conv2d(x, weight, bias, stride, padding)
            if to is not None:
                return to.add_(y)
            return y if slope is None else F.leaky_relu_(y, slope)
        # torch's names, for its own compiler, of oneDNN's convolutions with what follows them
        ops, dilation, key = torch.ops.mkldnn, (1, 1), (which, len(x))
        if key not in self.packed:
            self.packed[key] = ops._reorder_convolution_weight(weight, padding, stride, dilation, 1, x.shape)
        sizes = (self.packed[key], bias, padding, stride, dilation, 1)
        if to is not None:
            return ops._convolution_pointwise_.binary(to, x, *sizes, "add", 1.0, None, [], "")
        return ops._convolution_pointwise(x, *sizes, *(("none", []) if slope is None else ("leaky_relu", [slope])), "")


class _Block:
    """A block of `wide_resnet`. scratch: shared by all blocks of a network."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, scratch: dict[torch.Size, list[Tensor]]):
        first, one, second, two = module.residual
        self.slopes = first.slope, second.negative_slope
        self.one, self.two = _Conv(one, dtype), _Conv(two, dtype)
        self.shortcut = None if isinstance(module.shortcut, nn.Identity) else _Conv(module.shortcut, dtype)
        self.scratch = scratch

    def refresh(self) -> None:
        for conv in (self.one, self.two, self.shortcut):
            if conv is not None:
                conv.refresh()

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        a = F.leaky_relu(x, self.slopes[0])
        b, _ = self.one.forward(a, slope=self.slopes[1])
        along = x if self.shortcut is None else self.shortcut.forward(x)[0]
        return self.two.forward(b, to=along)[0], (a, b)

    def backward(self, grad: Tensor, kept: tuple[Tensor, Tensor]) -> Tensor:
        a, b = kept
        inner = _leaky_backward(self.two.backward(grad, b.shape), b, self.slopes[1], self._other(b.shape, grad))
        inner = _leaky_backward(self.one.backward(inner, a.shape), a, self.slopes[0], self._other(a.shape, grad))
        return grad.add_(inner) if self.shortcut is None else self.shortcut.backward(grad, a.shape, to=inner)

    def _other(self, shape: torch.Size, like: Tensor) -> Tensor:
        """A tensor to write to that is not `like`. Two of each shape serve in turn: new ones are not in the cache."""
        pair = self.scratch.setdefault(shape, [])
        if not pair:
            form = {"dtype": like.dtype, "device": like.device, "memory_format": torch.channels_last}
            pair.extend(torch.empty(shape, **form) for _ in range(2))
        return pair[1] if pair[0] is like else pair[0]


def _leaky_backward(grad: Tensor, y: Tensor, slope: float, out: Tensor) -> Tensor:
    """dL/dx, in `out`, of leaky ReLU from its output y, which has the sign of x."""
    return torch.ops.aten.leaky_relu_backward.grad_input(grad, y, slope, True, grad_input=out)


@functools.cache
def _fuses(device: str, dtype: torch.dtype) -> bool:
    """Whether oneDNN is there and takes this format on this machine; on x86 alone, where it was measured."""
    if device != "cpu" or platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


_SIMPLE = {
    nets._Scale: _Scale, nn.SiLU: _SiLU, LeakyReLU: _LeakyReLU, nn.PixelUnshuffle: _Unshuffle, nn.Flatten: _Flatten,
    nn.AdaptiveAvgPool2d: _Average,
}  # fmt: skip
#: what a network of `nets` is made of; the last three lie inside a block
MODULES = {*_SIMPLE, nets.Network, nets._Block, nets.Logits, nn.Linear, nn.Conv2d}
MODULES |= {nn.Sequential, nn.LeakyReLU, nn.Identity}


def of(network: nets.Network, dtype: torch.dtype) -> list[Layer]:
    """The layers of a network of `nets`, as ours."""
    found: list[Layer] = []
    scratch: dict[torch.Size, list[Tensor]] = {}
    channels = 1  # of the last convolution
    for module in network:
        if isinstance(module, nn.Linear):
            flat = bool(found) and isinstance(found[-1], _Flatten)
            its = torch.float32 if isinstance(module, nets.Logits) else dtype
            found.append(_Linear(module, its, channels if flat else 1))
        elif isinstance(module, nn.Conv2d):
            found.append(_Conv(module, dtype))
            channels = module.out_channels
        elif isinstance(module, nets._Block):
            found.append(_Block(module, dtype, scratch))
            channels = module.residual[-1].out_channels
        else:
            found.append(_SIMPLE[type(module)](module))
    return found
