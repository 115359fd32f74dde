"""The pieces of an iteration, timed one by one: `pytest tests/benchmarks --benchmark-enable`.

Without that option each is run once, as a test that it works.
"""

import pytest
import torch

from jemlib import objectives
from jemlib.benchmark import CASES, Iteration, plain_jem
from jemlib.images import augment
from jemlib.input_gradient import FrozenJEM
from jemlib.sampler import ReplayBuffer, sgld

SMALL = ["toy MLP", "MNIST net"]


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=SMALL)
def iteration(request):
    return Iteration(CASES[request.param], batch=16, n_steps=2, precision="float32", device=torch.device("cpu"))


def test_the_plain_iteration_is_the_same_algorithm():
    """Same data, chains and weights, no noise: the same weights after the update."""
    case = CASES["WRN-10-2"]
    iteration = Iteration(case, batch=4, n_steps=2, precision="float32", device=torch.device("cpu"), noise_std=0.0)
    iteration.plain.buffer = iteration.run.buffer.x.clone()
    order = torch.randperm(len(iteration.plain.buffer), generator=rng(1))[:4]
    start = iteration.plain.buffer[order]
    ours, _ = iteration.run.move(start, None)
    theirs = start
    for _ in range(2):
        theirs = plain_jem().langevin_step(iteration.plain.model, theirs, iteration.plain.step_size, 0.0)
    assert torch.allclose(ours, theirs.clamp(-1, 1), atol=1e-4)
    x, y = iteration.x[:4], iteration.y[:4]
    model, plain = iteration.run.model, iteration.plain.model
    f = model.logits(torch.cat([x, ours]))
    loss, _ = objectives.loss(objectives.method("jem"), f[:4], y, f[4:])
    loss.backward()
    (plain.energy(x).mean() - plain.energy(ours).mean() + torch.nn.functional.cross_entropy(plain(x), y)).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", [*SMALL, "WRN-10-2"])
def test_the_plain_network_is_of_torchs_own_layers(name):
    case = CASES[name]
    iteration = Iteration(case, batch=4, n_steps=1, precision="float32", device=torch.device("cpu"))
    model, plain = iteration.run.model, iteration.plain.model
    assert not [module for module in plain.modules() if type(module).__module__ == "jemlib.layers"]
    assert "WRN" not in name or [module for module in model.modules() if type(module).__module__ == "jemlib.layers"]
    x = torch.rand(4, *case.shape, generator=rng())
    assert torch.allclose(plain.logits(x), model.logits(x), atol=1e-5)


def test_sgld_step(benchmark, iteration):
    options = {"n_steps": 1, "step_size": 1.0, "noise_std": 0.01, "bounds": (-1.0, 1.0), "generator": rng()}
    benchmark(sgld, FrozenJEM(iteration.run.model), iteration.x, **options)


def test_plain_sgld_step(benchmark, iteration):
    benchmark(plain_jem().langevin_step, iteration.plain.model, iteration.x, 1.0, 0.01)


def test_iteration(benchmark, iteration):
    benchmark(iteration.run.iterate)


def test_plain_iteration(benchmark, iteration):
    benchmark(iteration.plain.iterate, iteration.x, iteration.y)


def test_input_gradient(benchmark, iteration):
    benchmark(FrozenJEM(iteration.run.model).energy_and_gradient, iteration.x)


def test_weights_taken_over(benchmark, iteration):
    benchmark(FrozenJEM(iteration.run.model).refresh)


def test_buffer_draw_and_put(benchmark):
    buffer = ReplayBuffer.uniform(10_000, (1, 28, 28), n_classes=10, generator=rng())

    def cycle(generator=rng()):  # noqa: B008  one stream for all rounds
        index, x, _ = buffer.draw(64, reinit_prob=0.05, generator=generator)
        buffer.put(index, x)

    benchmark(cycle)


def test_augmentation(benchmark):
    benchmark(augment, torch.zeros(64, 3, 32, 32), rng())


@pytest.mark.parametrize("method", ["jem", "st_jem", "st_jem_mi"])
def test_loss(benchmark, method):
    f = torch.randn(128, 10, generator=rng(), requires_grad=True)
    y = torch.arange(64) % 10
    benchmark(lambda: objectives.loss(objectives.method(method), f[:64], y, f[64:], y)[0].backward())
