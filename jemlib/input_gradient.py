"""dE/dx of a network whose weights are frozen while chains move, by hand, layer by layer.

Autograd finds the same gradient in more time. Here weights are cast, turned and packed once for all steps of a call;
activations and sums that follow a convolution are part of it where oneDNN offers that; and a batch goes forward and
back in pieces that a core's cache can hold, since chains do not depend on each other.
"""

from __future__ import annotations

import copy
import functools
import math
import platform
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jemlib import nets
from jemlib.energy import JEM, energy_from_logits
from jemlib.layers import LeakyReLU

#: bytes of the largest activation of a piece of the batch, for each thread of a CPU: an L2 cache of today
_PIECE = 2**21


class FrozenJEM:
    """A model's energies and their input gradients, with the weights of the last `refresh`, in eval mode.

    For `sgld`, in one thread at a time. dtype: what the network computes in, float32 or bfloat16. The networks of
    `nets` are differentiated by hand, any other by autograd on a copy.
    """

    def __init__(self, model: JEM, dtype: torch.dtype = torch.float32):
        self.model, self.dtype = model, dtype
        self.layers = _layers(model.backbone, dtype) if _known(model) else []
        self.copy = None if self.layers else copy.deepcopy(model).to(dtype).requires_grad_(False).eval()
        self.widest: dict[torch.Size, int] = {}
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the model's present weights."""
        for layer in self.layers:
            layer.refresh()
        if self.copy is not None:
            for part in ("parameters", "buffers"):
                for mine, its in zip(getattr(self.copy, part)(), getattr(self.model, part)(), strict=True):
                    mine.copy_(its)

    @torch.no_grad()
    def energy(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """E(x), or E(x, y) for labels y (B,), as (B,) in float32, without a graph. Equations (1) and (2)."""
        if self.copy is not None:
            return self.copy.energy(x.to(self.dtype, copy=True), y)
        return energy_from_logits(self._forward(x)[0], y)

    @torch.no_grad()
    def energy_and_gradient(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(E, dE/dx) at x (B, ...), of E(x) or, for labels y (B,), of E(x, y): (B,) in float32, and like x.

        By the chain rule: dE/df is -softmax(f), or minus the indicator of y, and goes back through the layers.
        """
        if self.copy is not None:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                energy = self.copy.energy(x.to(self.dtype, copy=True), y)  # a layer may write to what it is given
                return energy.detach(), torch.autograd.grad(energy.sum(), x)[0]
        energies, gradient = torch.empty(len(x), device=x.device), torch.empty_like(x)
        for part in self._pieces(x):
            f, kept = self._forward(x[part])
            label = None if y is None else y[part]
            energies[part] = energy_from_logits(f, label)
            shares = f.softmax(1) if label is None else torch.zeros_like(f).scatter_(1, label[:, None], 1)
            grad = shares.neg_()
            for layer in reversed(self.layers):
                grad = layer.backward(grad, kept.pop())
            gradient[part] = grad
        return energies, gradient

    def _forward(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        """Logits, in float32 as their layer is, and what each layer keeps for the way back."""
        x, kept = x.to(self.dtype), []
        for layer in self.layers:
            x, keep = layer.forward(x)
            kept.append(keep)
        return x, kept

    def _pieces(self, x: Tensor) -> list[slice]:
        """What to move at a time: on a CPU equal parts, whose activations stay in the cache; else everything."""
        if len(x) == 0:
            return []
        count = 1
        if x.device.type == "cpu":
            shape = x.shape[1:]
            if shape not in self.widest:
                self.widest[shape] = _widest(self.layers, x[:1].to(self.dtype))
            most = _PIECE * torch.get_num_threads() // (self.widest[shape] * self.dtype.itemsize)
            count = math.ceil(len(x) / max(most, 1))
        size = math.ceil(len(x) / count)
        return [slice(i, i + size) for i in range(0, len(x), size)]


def _widest(layers: list[Layer], x: Tensor) -> int:
    """Numbers in the largest output of a layer for one input."""
    widest = 1
    for layer in layers:
        x, _ = layer.forward(x)
        widest = max(widest, x.numel())
    return widest


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
_OF_NETS = {*_SIMPLE, nets.Network, nets._Block, nets.Logits, nn.Linear, nn.Conv2d}
_OF_NETS |= {nn.Sequential, nn.LeakyReLU, nn.Identity}  # inside a block


def _known(model: JEM) -> bool:
    """Whether the model is a JEM whose network is as `nets` builds it, and nothing hooks into it."""
    plain = type(model).logits is JEM.logits and type(model).energy is JEM.energy
    ours = type(model.backbone) is nets.Network and all(type(module) in _OF_NETS for module in model.backbone.modules())
    return plain and ours and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def _layers(network: nets.Network, dtype: torch.dtype) -> list[Layer]:
    """The layers of a network of `nets`, as ours. In its order nobody overwrites what another keeps."""
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
