"""The input gradient by hand against autograd's."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from jemlib import frozen_layers, input_gradient, nets
from jemlib.energy import JEM
from jemlib.input_gradient import FrozenJEM
from jemlib.layers import LeakyReLU
from jemlib.sampler import energy_and_gradient

NETWORKS = {
    "mlp": (lambda: nets.mlp(5, width=16, input_scale=5.0), (2,)),
    "mlp, one hidden layer": (lambda: nets.mlp(5, width=16, depth=1), (2,)),
    "conv_net": (lambda: nets.conv_net(5, size=28, width=8), (1, 28, 28)),
    "conv_net in colour": (lambda: nets.conv_net(5, channels=3, size=18, width=4, features=12), (3, 18, 18)),
    "wide_resnet": (lambda: nets.wide_resnet(5, depth=10, width=2), (3, 32, 32)),
    "wide_resnet, several blocks": (lambda: nets.wide_resnet(5, depth=16, width=1), (3, 16, 16)),
    "wide_resnet, odd sizes": (lambda: nets.wide_resnet(5, depth=10, width=1), (3, 13, 18)),
}


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def case(name, n=12):
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    return JEM(make()), torch.rand(n, *shape, generator=rng()) * 2 - 1, torch.arange(n) % 5


@pytest.fixture(params=[True, False], ids=["oneDNN", "torch"])
def fused(request, monkeypatch):
    """With oneDNN's fused convolutions, where they are here, and without."""
    if not request.param:
        monkeypatch.setattr(frozen_layers, "_fuses", lambda device, dtype: False)
    return request.param


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("labelled", [True, False])
def test_it_is_autograds(name, labelled, fused):
    model, x, y = case(name)
    y = y if labelled else None
    before = x.clone()
    energy, gradient = FrozenJEM(model).energy_and_gradient(x, y)
    exact = energy_and_gradient(model, x, y)
    assert torch.allclose(energy, exact[0], atol=1e-5)
    assert torch.allclose(gradient, exact[1], rtol=1e-4, atol=1e-5 * exact[1].abs().max().item())
    assert torch.equal(FrozenJEM(model).energy(x, y), energy)
    assert torch.equal(x, before) and not gradient.requires_grad
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["mlp", "conv_net", "wide_resnet, several blocks"])
def test_in_bfloat16_it_is_near(name, fused):
    model, x, y = case(name)
    energy, gradient = FrozenJEM(model, torch.bfloat16).energy_and_gradient(x, y)
    exact = energy_and_gradient(model, x, y)
    assert energy.dtype is gradient.dtype is torch.float32
    assert not torch.equal(energy, exact[0]) and (energy - exact[0]).abs().max() < 0.02 * exact[0].abs().max()
    assert F.cosine_similarity(gradient.flatten(), exact[1].flatten(), dim=0) > 0.99


@pytest.mark.parametrize("name", ["mlp", "conv_net", "wide_resnet"])
def test_energies_of_hundreds_of_nats_are_not_rounded_to_whole_ones(name):
    """Neither for the sampler nor in training; and where it has 8 bits, their last step is float32's."""
    model, x, y = case(name)
    with torch.no_grad():
        model.backbone[-1].bias.add_(200.0)
    exact = model.energy(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        trained = model.energy(x, y)
    for near in (trained, FrozenJEM(model, torch.bfloat16).energy(x, y)):
        assert near.dtype is torch.float32 and 0 < (near - exact).abs().max() < 0.1
        assert not torch.equal(near, near.bfloat16().float())


@pytest.mark.parametrize("name", NETWORKS)
def test_pieces_give_what_the_whole_gives(name, monkeypatch):
    model, x, y = case(name, n=11)
    network = FrozenJEM(model)
    assert network._pieces(x) == [slice(0, 11)]
    whole = network.energy_and_gradient(x, y)
    monkeypatch.setattr(input_gradient, "_PIECE", 3 * 4 * network.widest[x.shape[1:]] // torch.get_num_threads())
    assert [len(x[part]) for part in network._pieces(x)] == [3, 3, 3, 2]
    for a, b in zip(whole, network.energy_and_gradient(x, y), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


def test_the_widest_activation_is_counted_for_one_input():
    model, x, _ = case("wide_resnet")
    network = FrozenJEM(model)
    network._pieces(x)
    assert network.widest == {x.shape[1:]: 32 * 32 * 32}


@pytest.mark.parametrize("name", ["mlp", "conv_net", "wide_resnet"])
def test_refresh_takes_over_every_weight(name, fused):
    model, x, y = case(name)
    network = FrozenJEM(model)
    old = network.energy_and_gradient(x, y)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=rng(1)))
    assert all(map(torch.equal, network.energy_and_gradient(x, y), old)), "until it is told"
    network.refresh()
    assert all(map(torch.equal, network.energy_and_gradient(x, y), FrozenJEM(model).energy_and_gradient(x, y)))
    assert not torch.equal(network.energy_and_gradient(x, y)[1], old[1])


def test_the_same_call_gives_the_same_bits():
    """Scratch that is used again, and tensors that are written in place, leave nothing behind."""
    model, x, y = case("wide_resnet, several blocks")
    network = FrozenJEM(model)
    first = network.energy_and_gradient(x, y)
    network.energy_and_gradient(x.flip(0)[:7], None)
    assert all(map(torch.equal, network.energy_and_gradient(x, y), first))


@pytest.mark.parametrize(
    ("channels", "kernel", "padding", "stride"),
    [(3, 3, 1, 1), (16, 3, 1, 2), (16, 1, 0, 1), (16, 1, 0, 2), (16, 5, 1, 1), (16, 5, 1, 3)],
)
@pytest.mark.parametrize("size", [(12, 12), (13, 13), (9, 14)])
@torch.no_grad()
def test_a_convolution_and_what_follows_it(channels, kernel, padding, stride, size, fused):
    torch.manual_seed(0)
    module = nn.Conv2d(channels, 32, kernel, padding=padding, stride=stride)
    ours = frozen_layers._Conv(module, torch.float32)
    ours.refresh()
    x = torch.randn(8, channels, *size, generator=rng()).contiguous(memory_format=torch.channels_last)
    y, shape = ours.forward(x)
    assert torch.allclose(y, module(x), atol=1e-4)
    assert torch.allclose(ours.forward(x, slope=0.2)[0], F.leaky_relu(module(x), 0.2), atol=1e-4)
    base = torch.randn_like(y)
    assert torch.allclose(ours.forward(x, to=base.clone())[0], base + module(x), atol=1e-4)
    grad = torch.randn_like(y)
    expected = torch.nn.grad.conv2d_input(x.shape, module.weight, grad, stride=stride, padding=padding)
    assert torch.allclose(ours.backward(grad, shape), expected, atol=1e-4)
    base = torch.randn_like(x)
    assert torch.allclose(ours.backward(grad, shape, to=base.clone()), base + expected, atol=1e-4)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 5, bias=False)
        self.register_buffer("shift", torch.ones(5), persistent=False)

    def forward(self, x):
        return self.inner(x.mean((2, 3)).sin()) + self.shift


class Doubled(nets.Network):
    def forward(self, x):
        return 2 * super().forward(x)


class Cooled(JEM):
    def logits(self, x):
        return super().logits(x) / 3


def own(*layers):
    return JEM(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers))


def hooked():
    model = JEM(nets.conv_net(5, channels=3, size=12, width=4))
    model.backbone[1].register_forward_hook(lambda module, given, y: 2 * y)
    return model


HEAD = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
OTHERS = {
    "batch norm": lambda: own(nn.BatchNorm2d(8), LeakyReLU(0.2), *HEAD),
    "in place from the first layer on": lambda: JEM(
        nn.Sequential(LeakyReLU(0.2), nn.Conv2d(3, 8, 3), nn.ReLU(True), *HEAD)
    ),
    "our layers in another order": lambda: own(LeakyReLU(0.2), nets._Block(8, 8, 1), LeakyReLU(0.2), nn.SiLU(), *HEAD),
    "no sequence": lambda: own(Own()),
    "a sequence with a say": lambda: JEM(Doubled(*nets.conv_net(5, channels=3, size=12, width=4))),
    "logits of its own": lambda: Cooled(nets.conv_net(5, channels=3, size=12, width=4)),
    "a layer exchanged": lambda: JEM(nets.Network(nn.Conv2d(3, 8, 3), nn.Tanh(), *HEAD)),
    "a hook": hooked,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_are_taken_as_they_are(name):
    """In eval mode, by autograd, with nothing of theirs changed."""
    torch.manual_seed(0)
    model = OTHERS[name]()
    x, y = torch.rand(6, 3, 12, 12, generator=rng()) * 2 - 1, torch.arange(6) % 5
    for _ in range(3):
        model(x.clone())  # running statistics
    state, given = copy.deepcopy(model.state_dict()), x.clone()
    network = FrozenJEM(model)
    found = network.energy_and_gradient(x, y)
    assert model.training and all(torch.equal(a, state[key]) for key, a in model.state_dict().items())
    assert torch.equal(x, given)
    with torch.no_grad():
        for part in (*model.parameters(), *model.buffers()):
            if part.is_floating_point():
                part.mul_(1.1)
    stale, again = found, FrozenJEM(model)
    network.refresh()
    found = network.energy_and_gradient(x, y)
    assert all(map(torch.equal, found, again.energy_and_gradient(x, y))) and not torch.equal(found[1], stale[1])
    model.eval()
    leaf = x.clone().requires_grad_()
    energy = model.energy(leaf.clone(), y)
    assert torch.allclose(found[0], energy, atol=1e-5)
    assert torch.allclose(found[1], torch.autograd.grad(energy.sum(), leaf)[0], atol=1e-5)
    assert FrozenJEM(model, torch.bfloat16).energy_and_gradient(x)[1].dtype is torch.float32


@pytest.mark.parametrize("name", NETWORKS)
def test_the_networks_of_nets_are_differentiated_by_hand(name):
    network = FrozenJEM(case(name)[0])
    assert network.layers and network.copy is None


def test_fused_convolutions_are_for_x86(monkeypatch):
    fuses = frozen_layers._fuses.__wrapped__
    assert not fuses("cuda", torch.float32)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert not fuses("cpu", torch.float32)


@pytest.mark.parametrize("name", ["mlp", "conv_net", "wide_resnet"])
def test_an_empty_batch(name):
    model, x, y = case(name)
    energy, gradient = FrozenJEM(model).energy_and_gradient(x[:0], y[:0])
    assert energy.shape == (0,) and gradient.shape == x[:0].shape


@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_one_block(channels):
    model, x = JEM(nets.conv_net(5, channels=channels, size=2, width=4)), torch.rand(3, channels, 2, 2)
    assert torch.allclose(FrozenJEM(model).energy_and_gradient(x)[1], energy_and_gradient(model, x)[1], atol=1e-6)
