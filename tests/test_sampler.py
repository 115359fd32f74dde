"""SGLD and the replay buffer. Moments of known distributions are rows of the equation map (test_equations)."""

import math

import pytest
import torch
from torch import nn

from jemlib.checks import Flat, Mixture
from jemlib.energy import JEM
from jemlib.nets import mlp
from jemlib.sampler import ReplayBuffer, constant, implied_temperature, polynomial_decay, sgld


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=rng(seed))


GAUSSIAN = Mixture([[0.0, 0.0]], [1.0], 1.0)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return JEM(mlp(3, width=8, input_scale=3.0))


# --- the update ---------------------------------------------------------------------------------------------


def test_one_step_by_hand():
    """E = |x|^2 / 2: the drift is -(step / 2) x, the noise what the generator gives."""
    x = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    moved, _ = sgld(GAUSSIAN, x, n_steps=1, step_size=0.2, noise_std=0.5, generator=rng(3))
    noise = torch.empty(1, 2, dtype=torch.float64).normal_(generator=rng(3))
    assert torch.allclose(moved, 0.9 * x + 0.5 * noise)
    cold, _ = sgld(GAUSSIAN, x, n_steps=2, step_size=0.2, temperature=0.0, generator=rng())
    assert torch.allclose(cold, 0.81 * x)


@pytest.mark.parametrize("temperature", [0.25, 4.0])
def test_stationary_variance_is_the_temperature(temperature):
    start = math.sqrt(temperature) * normal(20_000, 1)
    one = Mixture([[0.0]], [1.0], 1.0)
    x, _ = sgld(one, start, n_steps=60, step_size=0.1, temperature=temperature, generator=rng(1))
    exact = temperature / (1 - 0.1 / 4)  # of the discretized chain
    assert float(x.var()) == pytest.approx(exact, rel=5 * math.sqrt(2 / 20_000))


def test_noise_set_apart_implies_a_temperature():
    options = {"n_steps": 5, "step_size": 0.1}
    a, _ = sgld(GAUSSIAN, normal(9, 2), **options, noise_std=0.2, generator=rng())
    b, _ = sgld(GAUSSIAN, normal(9, 2), **options, temperature=implied_temperature(0.1, 0.2), generator=rng())
    assert torch.allclose(a, b) and implied_temperature(0.1, 0.2) == pytest.approx(0.4)


def test_no_noise_descends_and_ends_at_the_minimum():
    x, health = sgld(GAUSSIAN, normal(50, 2), n_steps=200, step_size=0.2, temperature=0.0, generator=rng())
    assert float(health.uphill_share) == 0 and x.abs().max() < 1e-6 and health.energy_change < 0
    assert float(health.acceptance) == 1


@pytest.mark.parametrize("noise_std, temperature, variance", [(None, 1.0, 0.05), (None, 0.5, 0.025), (0.3, 1.0, 0.45)])
def test_zero_gradient_leaves_pure_noise(noise_std, temperature, variance):
    options = {"n_steps": 5, "step_size": 0.01, "noise_std": noise_std, "temperature": temperature}
    x, health = sgld(Flat(), torch.zeros(20_000, 2, dtype=torch.float64), **options, generator=rng())
    assert float(x.var()) == pytest.approx(variance, rel=0.04) and float(health.rms_step) == 0


def test_labels_choose_the_density():
    two = Mixture([[-2.0, 0.0], [2.0, 0.0]], [0.5, 0.5], 0.3)
    y = torch.arange(400) % 2
    x, _ = sgld(two, torch.zeros(400, 2, dtype=torch.float64), y, n_steps=300, step_size=0.02, generator=rng())
    assert (x[y == 0, 0] < 0).all() and (x[y == 1, 0] > 0).all()
    assert x[y == 1].mean(0)[0] == pytest.approx(2, abs=0.1)


def test_schedules():
    schedule = polynomial_decay(1.0, 1.0, 1.0)
    assert [schedule(t) for t in (0, 1, 3)] == [1, 0.5, 0.25] and constant(0.3)(99) == 0.3
    x = torch.ones(1, 1, dtype=torch.float64)
    moved, _ = sgld(
        GAUSSIAN, torch.ones(1, 2).double(), n_steps=2, step_size=schedule, temperature=0.0, generator=rng()
    )
    assert torch.allclose(moved, (1 - 0.5) * (1 - 0.25) * x.expand(1, 2))
    for gamma in (0.5, 1.1):
        with pytest.raises(ValueError, match="gamma"):
            polynomial_decay(1, 1, gamma)


def test_same_generator_same_samples(model):
    runs = [sgld(model, torch.ones(4, 2), n_steps=3, step_size=0.1, generator=rng(s))[0] for s in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


# --- bounds -------------------------------------------------------------------------------------------------


def test_reflection_keeps_a_uniform_density():
    x = torch.rand(40_000, 1, dtype=torch.float64, generator=rng()) * 2 - 1
    options = {"n_steps": 20, "step_size": 0.3, "bounds": (-1.0, 1.0), "generator": rng(1)}
    moved, _ = sgld(Flat(), x, at_bounds="reflect", **options)
    counts = torch.histc(moved, 20, -1, 1) / len(x)
    assert (counts - 0.05).abs().max() < 5 * math.sqrt(0.05 / len(x))
    clamped, _ = sgld(Flat(), x, at_bounds="clamp", **options)
    assert (clamped.abs() == 1).double().mean() > 0.1 and clamped.abs().max() == 1


def test_reflection_folds_at_both_walls():
    class Push:  # a constant force: dE/dx = -2
        def energy(self, x, y=None):
            return -2 * x.sum(1)

    x = torch.tensor([[0.8], [-0.5]], dtype=torch.float64)
    options = {"n_steps": 1, "temperature": 0.0, "bounds": (-1.0, 1.0), "at_bounds": "reflect", "generator": rng()}
    assert torch.allclose(sgld(Push(), x, step_size=0.5, **options)[0], torch.tensor([[0.7], [0.0]]).double())
    # 0.8 + 4.4 = 5.2 crosses several times: 5.2 -> -3.2 -> 1.2 -> 0.8
    assert torch.allclose(sgld(Push(), x[:1], step_size=4.4, **options)[0], torch.tensor([[0.8]]).double())


def test_bound_on_the_displacement_is_per_chain():
    x = torch.tensor([[100.0, 0.0], [0.01, 0.0]], dtype=torch.float64)
    options = {"n_steps": 1, "step_size": 1.0, "temperature": 0.0, "generator": rng()}
    moved, health = sgld(GAUSSIAN, x, max_rms_step=0.1, **options)
    rms = (moved - x).square().mean(1).sqrt()
    assert float(rms[0]) == pytest.approx(0.1) and float(rms[1]) == pytest.approx(0.005 / math.sqrt(2))
    assert float(health.rms_step) == pytest.approx(float(rms.square().mean().sqrt()))
    broken = torch.full((1, 2), math.nan, dtype=torch.float64)
    assert sgld(GAUSSIAN, broken, max_rms_step=0.1, **options)[0].isnan().all()


def test_gradient_clip_is_per_element():
    x = torch.tensor([[100.0, 0.5]], dtype=torch.float64)
    moved, _ = sgld(GAUSSIAN, x, n_steps=1, step_size=2.0, temperature=0.0, clip_grad=1.0, generator=rng())
    assert torch.allclose(moved, torch.tensor([[99.0, 0.0]]).double())


# --- health -------------------------------------------------------------------------------------------------


def test_acceptance_is_near_1_for_tiny_steps_and_falls_for_large_ones():
    rates = [
        float(sgld(GAUSSIAN, normal(2000, 2), n_steps=10, step_size=step, generator=rng(1))[1].acceptance)
        for step in (1e-4, 0.5, 3.0)
    ]
    assert rates[0] > 0.999 > rates[1] > rates[2] and rates[2] < 0.8


def test_acceptance_of_one_move_by_hand():
    x = torch.tensor([[0.3, -0.4]], dtype=torch.float64)
    options = {"step_size": 0.8, "noise_std": 0.7}
    end, _ = sgld(GAUSSIAN, x, n_steps=1, **options, generator=rng(2))
    _, health = sgld(GAUSSIAN, x, n_steps=2, **options, generator=rng(2))
    target = lambda z: -0.5 * z.square().sum() * 0.8 / 0.49  # noqa: E731
    proposal = lambda z, start: -((z - 0.6 * start).square().sum()) / (2 * 0.49)  # noqa: E731
    ratio = target(end) - target(x) + proposal(x, end) - proposal(end, x)
    assert float(health.acceptance) == pytest.approx(math.exp(min(0.0, float(ratio))))


def test_health_of_too_few_steps_is_nan():
    x, health = sgld(GAUSSIAN, normal(3, 2), n_steps=0, step_size=1.0, generator=rng())
    assert torch.equal(x, normal(3, 2)) and all(math.isnan(value) for value in health)
    _, health = sgld(GAUSSIAN, normal(3, 2), n_steps=1, step_size=1.0, generator=rng())
    assert math.isnan(health.acceptance) and not math.isnan(health.rms_step)


def test_overshooting_is_seen():
    _, health = sgld(GAUSSIAN, normal(50, 2), n_steps=5, step_size=6.0, temperature=0.0, generator=rng())
    assert float(health.uphill_share) == 1 and health.energy_change > 0


# --- nothing else is touched --------------------------------------------------------------------------------


def test_input_and_model_are_left_as_they_were(model):
    start = torch.ones(4, 2)
    kept = start.clone()
    weights = [p.clone() for p in model.parameters()]
    x, _ = sgld(model, start, n_steps=3, step_size=0.5, generator=rng())
    assert torch.equal(start, kept) and not start.requires_grad and not torch.equal(x, kept)
    assert not x.requires_grad and x.grad_fn is None
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(weights, model.parameters(), strict=True))
    same, _ = sgld(model, start, n_steps=0, step_size=0.5, generator=rng())
    assert same.data_ptr() != start.data_ptr()


@pytest.mark.parametrize("fails", [False, True])
def test_mixed_flags_and_modes_are_restored(fails):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 3), nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))
            self.seen = []

        def energy(self, x, y=None):
            self.seen.append((any(p.requires_grad for p in self.parameters()), any(m.training for m in self.modules())))
            if fails:
                raise RuntimeError("energy failed")
            return self.b(self.a(x))[:, 0]

    net = Net().train()
    net.b.eval()
    net.b[0].train()
    net.a.weight.requires_grad_(False)
    flags = [p.requires_grad for p in net.parameters()]
    modes = [m.training for m in net.modules()]
    if fails:
        with pytest.raises(RuntimeError, match="energy failed"):
            sgld(net, torch.ones(1, 2), n_steps=2, step_size=0.1, generator=rng())
    else:
        sgld(net, torch.ones(1, 2), n_steps=2, step_size=0.1, generator=rng())
    assert net.seen and set(net.seen) == {(False, False)}
    assert flags == [p.requires_grad for p in net.parameters()] and modes == [m.training for m in net.modules()]


def test_sampling_works_where_gradients_are_off(model):
    with torch.no_grad():
        x, _ = sgld(model, torch.ones(2, 2), n_steps=2, step_size=0.1, temperature=0.0, generator=rng())
    assert not torch.equal(x, torch.ones(2, 2))


@pytest.mark.parametrize("options", [{"n_steps": -1}, {"n_steps": 1, "at_bounds": "wrap"}])
def test_wrong_options(options):
    with pytest.raises(ValueError):
        sgld(GAUSSIAN, normal(1, 2), step_size=0.1, generator=rng(), **options)


# --- the buffer ---------------------------------------------------------------------------------------------


def test_draw_without_replacement_and_put_back():
    buffer = ReplayBuffer.uniform(10, (2,), generator=rng())
    index, x, y = buffer.draw(10, reinit_prob=0.0, generator=rng(1))
    assert sorted(index.tolist()) == list(range(10)) and y is None
    assert torch.equal(x, buffer.x[index])
    buffer.put(index, x + 1)
    assert torch.equal(buffer.x[index], x + 1)
    with pytest.raises(ValueError, match="11"):
        buffer.draw(11, reinit_prob=0.0, generator=rng())


def test_no_alias_and_no_graph():
    buffer = ReplayBuffer.uniform(6, (2,), generator=rng())
    kept = buffer.x.clone()
    index, x, _ = buffer.draw(3, reinit_prob=0.0, generator=rng())
    x.add_(5)
    assert torch.equal(buffer.x, kept)
    ours = x.clone().requires_grad_()
    buffer.put(index, ours * 2)
    assert not buffer.x.requires_grad and buffer.x.grad_fn is None
    given = torch.zeros(3, 2)
    buffer.put(index, given)
    given.add_(9)
    assert (buffer.x[index] == 0).all()


def test_restart_share_range_and_labels():
    n = 20_000
    buffer = ReplayBuffer(torch.full((n, 1), 7.0), torch.arange(n) % 4, low=-0.5, high=0.25)
    index, x, y = buffer.draw(n, reinit_prob=0.1, generator=rng())
    fresh = x[:, 0] != 7
    assert float(fresh.float().mean()) == pytest.approx(0.1, abs=5 * math.sqrt(0.09 / n))
    assert (
        x[fresh].min() >= -0.5 and x[fresh].max() <= 0.25 and float(x[fresh].mean()) == pytest.approx(-0.125, abs=0.03)
    )
    assert torch.equal(y, index % 4)
    assert (buffer.x == 7).all()  # a restart touches the store only when it is put back


@pytest.mark.parametrize("size", [9, 10, 12])
def test_labels_in_equal_shares(size):
    counts = torch.bincount(ReplayBuffer.uniform(size, (1,), n_classes=4, generator=rng()).y)
    assert len(counts) == 4 and counts.max() - counts.min() <= 1


@pytest.mark.parametrize("n_classes", [None, 3])
def test_state_round_trip(n_classes):
    buffer = ReplayBuffer.uniform(9, (1, 2, 2), n_classes=n_classes, low=0.0, high=0.5, generator=rng())
    state = buffer.state_dict()
    copy = ReplayBuffer.from_state(state)
    before = buffer.draw(5, reinit_prob=0.5, generator=rng(4))
    after = copy.draw(5, reinit_prob=0.5, generator=rng(4))
    assert all(a is b or torch.equal(a, b) for a, b in zip(before, after, strict=True))
    copy.put(torch.tensor([0]), torch.zeros(1, 1, 2, 2))
    assert torch.equal(state["x"], buffer.x) and not torch.equal(copy.x, buffer.x)


def test_energies_that_share_memory_with_x_are_judged_as_others_are():
    """A linear potential whose energy is a view of x: from step to step nothing of it may be overwritten."""

    class Linear:
        def __init__(self, copy):
            self.copy = copy

        def energy(self, x, y=None):
            return x[:, 0].clone() if self.copy else x[:, 0]

    options = {"n_steps": 20, "step_size": 0.1}
    healths = [
        sgld(Linear(copy), torch.ones(100, 2), **options, generator=torch.Generator().manual_seed(0))[1]
        for copy in (True, False)
    ]
    assert healths[0] == healths[1] and healths[0].acceptance > 0.99
