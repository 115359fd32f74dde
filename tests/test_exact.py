"""The exact references, against closed forms that they do not use."""

import math
from dataclasses import replace

import pytest
import torch

from jemlib import estimators, exact, nets
from jemlib.energy import JEM
from jemlib.exact import Space
from jemlib.objectives import METHODS, Method, loss
from jemlib.toy import DISTRIBUTIONS, Toy


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def random_joint(n=12, k=3, seed=0):
    logits = torch.randn(n, k, dtype=torch.float64, generator=rng(seed))
    return exact.log_conditional(logits, torch.zeros(n, dtype=torch.float64)) - math.log(k)


def test_grid_has_the_area_of_the_square():
    space = Space.grid(10)
    assert space.points.shape == (100, 2) and space.log_mass.exp().sum() == pytest.approx(4)
    assert space.points.min() == pytest.approx(-0.9) and space.points[1, 0] > space.points[0, 0]


def test_log_z_of_a_gaussian():
    space = Space.grid(64)
    logits = (-space.points.square().sum(1) / (2 * 0.1**2))[:, None]
    assert float(exact.log_z(logits, space.log_mass)) == pytest.approx(math.log(2 * math.pi * 0.01), abs=1e-9)


def test_kl_of_two_gaussians_and_of_disjoint_points():
    space = Space.grid(128)
    p, q = (
        exact.log_marginal((-space.points.square().sum(1) / (2 * s**2))[:, None], space.log_mass) for s in (0.1, 0.15)
    )
    wanted = 2 * (math.log(0.15 / 0.1) + 0.1**2 / (2 * 0.15**2) - 0.5)
    assert float(exact.kl(p, q, space.log_mass)) == pytest.approx(wanted, abs=1e-9)
    assert float(exact.kl(p, p, space.log_mass)) == 0
    point = torch.tensor([0.0, -math.inf], dtype=torch.float64)
    half = torch.full((2,), math.log(0.5), dtype=torch.float64)
    assert float(exact.kl(point, half, torch.zeros(2))) == pytest.approx(math.log(2))


def test_information_of_a_hand_worked_table():
    p = torch.tensor([[0.4, 0.1], [0.1, 0.4]], dtype=torch.float64)
    wanted = 0.8 * math.log(0.4 / 0.25) + 0.2 * math.log(0.1 / 0.25)
    for form, value in exact.mutual_information(p.log() + 3, torch.zeros(2)).items():
        assert float(value) == pytest.approx(wanted, abs=1e-12), form


def test_nll_is_a_likelihood_and_its_minimum_is_the_data():
    mass = torch.zeros(12, dtype=torch.float64)
    f = torch.randn(12, 3, dtype=torch.float64, generator=rng(1))
    index, y = torch.tensor([3, 5]), torch.tensor([0, 2])
    by_hand = -(f.exp() / f.exp().sum()).log()[index, y].mean()
    assert float(exact.nll(f[index], y, f, mass)) == pytest.approx(float(by_hand))

    counts = torch.randint(1, 6, (12, 3), generator=rng())  # data: each pair of state and label so many times
    pairs = torch.arange(36).repeat_interleave(counts.flatten())
    index, y = pairs // 3, pairs % 3
    log_data = (counts.double() / counts.sum()).log()
    best = (log_data + 2).requires_grad_()
    least = exact.nll(best[index], y, best, mass)
    assert float(least.detach()) == pytest.approx(float(-(log_data.exp() * log_data).sum())), "the entropy of the data"
    assert torch.autograd.grad(least, best)[0].abs().max() < 1e-12
    above = float(exact.nll(f[index], y, f, mass) - least.detach())
    assert above == pytest.approx(float(exact.kl(log_data, exact.log_joint(f, mass), mass))) and above > 0.1


def test_draw_follows_the_density():
    log_p = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64).log()
    counts = torch.bincount(exact.draw(log_p, torch.zeros(3), 40_000, rng()), minlength=3) / 40_000
    assert (counts - log_p.exp()).abs().max() < 0.01


# --- the update in expectation ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["jem", "jem_joint", "st_jem", "st_jem_own", "st_jem_none", "st_jem_plain"])
def test_expected_update_is_the_mean_of_the_trained_losses_gradient(name):
    """Many data and samples through `objectives.loss` give the gradient that `expected_loss` states."""
    method, log_data, n = METHODS[name], random_joint(6, 2), 200_000
    space, f = Space.states(6), torch.randn(6, 2, dtype=torch.float64, generator=rng(2))
    log_q = exact.sampler_density(method, f, space.log_mass, uniform_share=0.3)
    if name == "st_jem_own":  # its candidates are a table of data x samples
        n = 4000
    y = torch.arange(n) % 2

    def labelled(log_p, seed):
        index = torch.empty(n, dtype=torch.long)
        for k in (0, 1):
            index[y == k] = exact.draw(log_p[:, k], space.log_mass, n // 2, rng(seed + k))
        return index

    leaf = f.clone().requires_grad_()
    value, _ = loss(method, leaf[labelled(log_data, 10)], y, leaf[labelled(log_q, 20)], y)
    (gradient,) = torch.autograd.grad(value, leaf)
    update = exact.expected_update(method, f, log_data, log_q, space.log_mass, n_samples=n)
    assert (update + gradient).abs().max() < 8 / math.sqrt(n)
    assert update.abs().max() > 0.05


def test_own_anchor_of_one_sample_is_felt():
    f, log_data = torch.randn(6, 2, dtype=torch.float64, generator=rng(2)), random_joint(6, 2)
    mass = torch.zeros(6, dtype=torch.float64)
    log_q = exact.sampler_density(METHODS["st_jem_own"], f, mass, 1.0)
    few = exact.expected_update(METHODS["st_jem_own"], f, log_data, log_q, mass, n_samples=1)
    many = exact.expected_update(METHODS["st_jem_own"], f, log_data, log_q, mass, n_samples=1e9)
    none = exact.expected_update(METHODS["st_jem_none"], f, log_data, log_q, mass)
    assert (few - none).abs().max() > 1e-2 and (many - none).abs().max() < 1e-8


def test_own_anchor_by_hand():
    """One sample a datum: the denominator is half the datum's own term, half the samples' mean."""
    method = replace(METHODS["st_jem_own"], classify=0.0)
    f = torch.tensor([[math.log(2)], [math.log(4)]], dtype=torch.float64)
    log_data, mass = torch.tensor([[0.25], [0.75]], dtype=torch.float64).log(), torch.zeros(2, dtype=torch.float64)
    log_q = torch.full((2, 1), math.log(0.5), dtype=torch.float64)  # mean of exp(f) under q: 3
    wanted = 0.25 * math.log((2 + 3) / 2 / 2) + 0.75 * math.log((4 + 3) / 2 / 4)
    assert float(exact.expected_loss(method, f, log_data, log_q, mass, n_samples=1)) == pytest.approx(wanted)
    with pytest.raises(ValueError, match="plain average with an anchor"):
        exact.expected_loss(replace(method, exponent=0.0), f, log_data, log_q, mass)


def test_predictions_of_balanced_labels_are_the_plain_formulas():
    """Labels that stay balanced when p(x) is flattened: sqrt(p_d), and the quadratic with q = p."""
    x = torch.tensor([0.4, 0.1, 0.4, 0.1], dtype=torch.float64)
    posterior = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.2, 0.8], [0.4, 0.6]], dtype=torch.float64)
    log_data, mass = (x[:, None] * posterior).log(), torch.zeros(4, dtype=torch.float64)
    flat = exact.predicted(METHODS["st_jem_none"], log_data, mass, "perfect").exp().sum(1)
    assert torch.allclose(flat, x.sqrt() / x.sqrt().sum())
    p = exact.predicted(METHODS["st_jem"], log_data, mass, "perfect").exp().sum(1)
    ratio = p * (x + p) / x
    assert float(p.sum()) == pytest.approx(1, abs=1e-12) and float(ratio.max() - ratio.min()) < 1e-12
    uniform = exact.predicted(METHODS["st_jem"], log_data, mass, "uniform").exp().sum(1)
    wanted = x / (x / 2 + 0.25 / 2)
    assert torch.allclose(uniform, wanted / wanted.sum())
    assert torch.allclose(exact.predicted(METHODS["st_jem_own"], log_data, mass, "uniform"), log_data)


def test_predictions_that_do_not_exist():
    log_data, mass = random_joint(), torch.zeros(12, dtype=torch.float64)
    assert exact.predicted(METHODS["jem"], log_data, mass, "uniform") is None
    assert exact.predicted(METHODS["softmax"], log_data, mass, "perfect") is None
    with pytest.raises(ValueError, match="one label"):
        exact.predicted(replace(METHODS["st_jem_none"], exponent=0.5), log_data, mass, "perfect")
    with pytest.raises(ValueError, match="perfect or uniform"):
        exact.predicted(METHODS["jem"], log_data, mass, "broken")


def test_divergence_is_reported_and_shares_between_rest_between():
    log_data, mass = random_joint(), torch.zeros(12, dtype=torch.float64)
    ran_away = exact.stationary(METHODS["jem_joint"], log_data, mass, 1.0, limit=100)
    assert ran_away.status == "diverged" and ran_away.logits.abs().max() > 100
    short = exact.stationary(METHODS["st_jem"], log_data, mass, 0.0, max_steps=3)
    assert short.status == "unfinished" and short.steps == 3
    distances = []
    for share in (0.0, 0.5, 1.0):
        rest = exact.stationary(METHODS["st_jem_none"], log_data, mass, share)
        assert rest.status == "converged"
        distances.append(float(exact.kl(log_data, exact.log_joint(rest.logits, mass), mass)))
    assert distances[0] > distances[1] > distances[2] and distances[2] < 1e-10


def test_conditional_chains_leave_the_share_of_labels_free():
    """Du and Mordatch's loss with balanced chains learns p(x given y); nothing in it moves p(y)."""
    log_data, mass = random_joint(), torch.zeros(12, dtype=torch.float64)
    f = log_data + torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    log_q = exact.sampler_density(METHODS["jem_joint"], f, mass)
    assert exact.expected_update(METHODS["jem_joint"], f, log_data, log_q, mass).abs().max() < 1e-12


# --- toy distributions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_toy_density_integrates_to_1_and_matches_its_samples(name):
    toy, space = Toy(name), Space.grid(200)
    joint = toy.log_joint(space.points)
    shares = exact.log_labels(joint, space.log_mass).exp()
    assert abs(float((joint + space.log_mass[:, None]).exp().sum()) - 1) < 1e-6
    assert torch.allclose(shares, torch.full_like(shares, 1 / toy.n_classes), atol=1e-6)
    x, y = toy.sample(60_000, rng())
    assert x.abs().max() <= 1 and torch.bincount(y).max() - torch.bincount(y).min() <= 1
    entropy = -((joint + space.log_mass[:, None]).exp() * joint).sum()
    scores = -toy.log_joint(x).gather(1, y[:, None])[:, 0]
    assert abs(float(scores.mean() - entropy)) < 5 * float(scores.std()) / math.sqrt(len(x))
    # the law itself, not only its entropy: counts in coarse cells, class by class
    cells = 5
    for k in range(toy.n_classes):
        where = ((x[y == k] + 1) / 2 * cells).long().clamp_max(cells - 1)
        counts = torch.bincount(where[:, 1] * cells + where[:, 0], minlength=cells**2)
        grid = ((space.points + 1) / 2 * cells).long()
        p = torch.zeros(cells**2, dtype=torch.float64)
        p.index_add_(0, grid[:, 1] * cells + grid[:, 0], (joint[:, k] + space.log_mass).exp() * toy.n_classes)
        n = int(counts.sum())
        assert ((counts / n - p).abs() < 5 * (p * (1 - p) / n).sqrt() + 1e-4).all()


def test_toy_sampler_is_explicit():
    a, b, c = (Toy("spirals").sample(50, rng(seed))[0] for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)
    with pytest.raises(ValueError, match="rings"):
        Toy("ring")


# --- gradient estimators ------------------------------------------------------------------------------------


def test_jacobian_against_autograd():
    torch.manual_seed(0)
    model = JEM(nets.mlp(2, width=5)).double()
    points = Space.grid(4).points
    rows = estimators.jacobian(model, points, 1)
    alone = torch.autograd.grad(model.logits(points)[9, 1], list(model.parameters()))
    assert torch.allclose(rows[9], torch.cat([g.flatten() for g in alone]))


def test_estimators_are_unbiased_where_they_should_be():
    bench = estimators.bench(n=20, width=8)
    rows = estimators.compare(bench, [0.0, 1.0], [128], size=128, repeats=30).set_index(["estimator", "uniform_share"])
    bias = rows["bias"]
    assert bias["plain average", 0.0] < 0.3 < 1 < bias["plain average", 1.0]
    assert bias["weights", 1.0] < 0.3 < 1 < bias["weights", 0.0]
    assert bias["weights, whole batch", 0.0] > 0.5 < bias["weights, whole batch", 1.0]
    assert rows["cosine_of_mean"]["plain average", 0.0] > 0.95 < rows["cosine_of_mean"]["weights", 1.0]


def test_method_without_samples_moves_the_posterior_only():
    log_data, mass = random_joint(), torch.zeros(12, dtype=torch.float64)
    update = exact.expected_update(Method(), torch.zeros_like(log_data), log_data, log_data, mass)
    assert update.sum(1).abs().max() < 1e-12 and update.abs().max() > 1e-3
