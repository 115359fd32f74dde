"""Our layers against torch's own."""

import pytest
import torch
from torch import nn

from jemlib.layers import Conv2d, LeakyReLU, _FrozenConv
from jemlib.nets import wide_resnet


def images(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradient_of_input(layer, x):
    x = x.clone().requires_grad_()
    y = layer(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    return y.detach(), gradient


@pytest.mark.parametrize(
    ("channels", "kernel", "padding", "stride"),
    [(3, 3, 1, 1), (16, 3, 1, 2), (16, 1, 0, 1), (16, 1, 0, 2), (16, 5, 1, 1), (16, 5, 1, 3)],
)
@pytest.mark.parametrize("size", [(12, 12), (13, 13), (9, 14)])
def test_input_gradient_of_a_frozen_convolution(channels, kernel, padding, stride, size):
    torch.manual_seed(0)
    torch_conv = nn.Conv2d(channels, 32, kernel, padding=padding, stride=stride).to(memory_format=torch.channels_last)
    ours = Conv2d(channels, 32, kernel, padding=padding, stride=stride).to(memory_format=torch.channels_last)
    ours.load_state_dict(torch_conv.state_dict())
    ours.requires_grad_(False)
    x = images(8, channels, *size)
    for a, b in zip(gradient_of_input(torch_conv, x), gradient_of_input(ours, x), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{"padding_mode": "reflect", "padding": 1}, {"dilation": 2}, {"groups": 4}, {"padding": "same"}, {"padding": 3}],
)
def test_other_convolutions_are_torchs(options):
    torch.manual_seed(0)
    theirs, ours = (kind(8, 16, 3, **options).to(memory_format=torch.channels_last) for kind in (nn.Conv2d, Conv2d))
    ours.load_state_dict(theirs.state_dict())
    ours.requires_grad_(False)
    x = images(2, 8, 9, 9)
    assert all(map(torch.equal, gradient_of_input(theirs, x), gradient_of_input(ours, x)))
    assert ours(x[0].requires_grad_()).shape == theirs(x[0]).shape, "one image without a batch"


def test_the_fast_path_is_taken_only_while_frozen_and_channels_last(monkeypatch):
    calls = []
    apply = _FrozenConv.apply
    monkeypatch.setattr(_FrozenConv, "apply", lambda *a: calls.append(1) or apply(*a))
    x = images(2, 3, 8, 8)
    conv = Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
    gradient_of_input(conv, x)
    conv.requires_grad_(False)
    conv(x)
    gradient_of_input(Conv2d(3, 8, 3, padding=1).requires_grad_(False), x)
    assert not calls
    gradient_of_input(conv, x)
    assert calls


def test_leaky_relu_is_torchs():
    a, b = (gradient_of_input(layer, images(4, 3, 5, 5)) for layer in (nn.LeakyReLU(0.2), LeakyReLU(0.2)))
    assert all(map(torch.equal, a, b))


def test_a_wide_resnet_is_the_same_function_as_one_of_torchs_layers():
    """Also its weights' gradients, from one graph: in-place sums and kept outputs must not disturb it."""
    torch.manual_seed(0)
    ours = wide_resnet(10, depth=10, width=1)
    x, params = images(4, 3, 16, 16), list(ours.parameters())
    grads = torch.autograd.grad(ours(x).logsumexp(1).sum(), params)

    def plain(x):
        first, *blocks, _, pool, flat, last = ours
        conv = nn.functional.conv2d
        x = conv(x, first.weight, first.bias, padding=1)
        for block in blocks:
            h = nn.functional.leaky_relu(x, 0.2)
            h = conv(h, block.residual[1].weight, block.residual[1].bias, block.residual[1].stride, 1)
            h = conv(nn.functional.leaky_relu(h, 0.2), block.residual[3].weight, block.residual[3].bias, 1, 1)
            x = block.shortcut(x) + h
        return last(flat(pool(nn.functional.leaky_relu(x, 0.2))))

    expected = torch.autograd.grad(plain(x).logsumexp(1).sum(), params)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(grads, expected, strict=True))
