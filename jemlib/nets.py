"""Backbones: maps from inputs (B, ...) to logits (B, K). None of them normalizes over the batch."""

from __future__ import annotations

import torch
from torch import nn

from jemlib.layers import LeakyReLU


class Network(nn.Sequential):
    """A network as the functions below build it; `input_gradient` knows those by hand, and takes others as they are."""


def mlp(
    n_classes: int, *, n_features: int = 2, width: int = 128, depth: int = 2, input_scale: float = 1.0
) -> nn.Module:
    """A multi-layer perceptron with SiLU: `depth` hidden layers of `width`; inputs are multiplied by input_scale."""
    layers: list[nn.Module] = [_Scale(input_scale)]
    for i in range(depth):
        layers += [nn.Linear(n_features if i == 0 else width, width), nn.SiLU()]
    return Network(*layers, Logits(width, n_classes))


def conv_net(n_classes: int, *, channels: int = 1, size: int = 28, width: int = 16, features: int = 0) -> nn.Module:
    """A small convolutional net with SiLU for images (B, channels, size, size), size even.

    features: units of a last hidden layer, which makes a compact feature net; 0 for none.

    Smooth activations matter here: the sampler follows the input gradient. The image enters as 2x2 blocks of pixels,
    because a convolution over few channels is the slowest part of the input gradient on a CPU.
    """
    edge = (size // 2 + 3) // 4  # two strides of 2, each of which rounds up
    net = Network(
        nn.PixelUnshuffle(2),
        nn.Conv2d(4 * channels, width, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.Flatten(),
        *([nn.Linear(4 * width * edge**2, features), nn.SiLU()] if features else []),
        Logits(features or 4 * width * edge**2, n_classes),
    )
    return net.to(memory_format=torch.channels_last)  # the same within rounding, in less time on a CPU


def wide_resnet(
    n_classes: int, *, channels: int = 3, depth: int = 10, width: int = 2, norm: str | None = None
) -> nn.Module:
    """A wide residual net as JEM uses it, for images (B, channels, H, W), of any size.

    depth: 6n + 4 layers, n pre-activation blocks in each of three stages; width: k, the stages have 16k, 32k and 64k
    channels. LeakyReLU(0.2), no normalization; as in the original net, a block's first convolution has the stride.
    norm: only None. Raises ValueError for norm="batch": with it the energy of an image depends on the images beside
    it, chains would follow other statistics than training, and samples would enter those of the data.
    """
    if norm is not None:
        raise ValueError(
            f"wide_resnet has no norm={norm!r}: under batch statistics p(x) is no function of x alone; leave norm=None"
        )
    blocks = blocks_per_stage(depth)
    widths = [16] + [16 * width * 2**stage for stage in range(3) for _ in range(blocks)]
    strides = [2 if stage and not i else 1 for stage in range(3) for i in range(blocks)]
    net = Network(
        nn.Conv2d(channels, 16, 3, padding=1),
        *map(_Block, widths[:-1], widths[1:], strides),
        LeakyReLU(0.2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        Logits(widths[-1], n_classes),
    )
    return net.to(memory_format=torch.channels_last)  # the same within rounding, in less time on a CPU


def blocks_per_stage(depth: int) -> int:
    """n of a wide_resnet of 6n + 4 layers; ValueError for another depth."""
    blocks, rest = divmod(depth - 4, 6)
    if rest or blocks < 1:
        raise ValueError(f"the depth of a wide_resnet is 6n + 4 (10, 16, 22, 28, ...), not {depth}")
    return blocks


class _Block(nn.Module):
    """x -> shortcut(x) + two 3x3 convolutions, each after an activation."""

    def __init__(self, n_in: int, n_out: int, stride: int):
        super().__init__()
        self.residual = nn.Sequential(
            LeakyReLU(0.2),
            nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1),
            nn.LeakyReLU(0.2, inplace=True),  # nobody else needs what it is given
            nn.Conv2d(n_out, n_out, 3, padding=1),
        )
        same = stride == 1 and n_in == n_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(n_in, n_out, 1, stride=stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.residual(x).add_(self.shortcut(x))  # no third tensor of that size


class Logits(nn.Linear):
    """The last layer, in float32 whatever the others compute in.

    With the 8 bits of bfloat16 an energy of 150 nats would be a whole number.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.weight.dtype))


class _Scale(nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor
