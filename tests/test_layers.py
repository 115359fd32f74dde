"""Our layer, and networks with it, against torch's own."""

import torch
from torch import nn

from jemlib.layers import LeakyReLU
from jemlib.nets import wide_resnet


def images(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradient_of_input(layer, x):
    x = x.clone().requires_grad_()
    y = layer(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    return y.detach(), gradient


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
