"""Backbones: maps from inputs (B, ...) to logits (B, K). None of them normalizes over the batch."""

from __future__ import annotations

import torch
from torch import nn


def mlp(
    n_classes: int, *, n_features: int = 2, width: int = 128, depth: int = 2, input_scale: float = 1.0
) -> nn.Module:
    """A multi-layer perceptron with SiLU: `depth` hidden layers of `width`; inputs are multiplied by input_scale."""
    layers: list[nn.Module] = [_Scale(input_scale)]
    for i in range(depth):
        layers += [nn.Linear(n_features if i == 0 else width, width), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(width, n_classes))


def conv_net(n_classes: int, *, channels: int = 1, size: int = 28, width: int = 16, features: int = 0) -> nn.Module:
    """A small convolutional net with SiLU for images (B, channels, size, size), size even.

    features: units of a last hidden layer, which makes a compact feature net; 0 for none.

    Smooth activations matter here: the sampler follows the input gradient. The image enters as 2x2 blocks of pixels,
    because a convolution over few channels is the slowest part of the input gradient on a CPU.
    """
    edge = (size // 2 + 3) // 4  # two strides of 2, each of which rounds up
    return nn.Sequential(
        nn.PixelUnshuffle(2),
        nn.Conv2d(4 * channels, width, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.Flatten(),
        *([nn.Linear(4 * width * edge**2, features), nn.SiLU()] if features else []),
        nn.Linear(features or 4 * width * edge**2, n_classes),
    )


class _Scale(nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor
