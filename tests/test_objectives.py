"""Losses against numbers worked by hand. Their gradients in expectation are in test_exact and test_equations."""

import math
from dataclasses import replace

import pytest
import torch

from jemlib import objectives
from jemlib.energy import energy_from_logits
from jemlib.objectives import ANCHORS, METHODS, Method, importance_weighted, loss, method, negative_phase

L2, L3 = math.log(2), math.log(3)
F_POS = torch.tensor([[0.0, L2], [L3, 0.0]], dtype=torch.float64)  # f(x^1), f(x^2)
F_NEG = torch.tensor([[L2, 0.0], [0.0, 0.0], [L3, L2]], dtype=torch.float64)
Y = torch.tensor([1, 0])
Y_NEG = torch.tensor([0, 1, 0])


def same(value, wanted):
    return float(value) == pytest.approx(wanted, abs=1e-12)


def test_energies():
    assert energy_from_logits(F_POS).tolist() == pytest.approx([-L3, -math.log(4)])
    assert energy_from_logits(F_POS, Y).tolist() == pytest.approx([-L2, -L3])


def test_cross_entropy():
    assert same(objectives.cross_entropy(F_POS, Y), -(math.log(2 / 3) + math.log(3 / 4)) / 2)


def test_contrastive():
    energies = energy_from_logits(F_POS), energy_from_logits(F_NEG)
    wanted = -(L3 + math.log(4)) / 2 + (math.log(3) + L2 + math.log(5)) / 3
    assert same(objectives.contrastive(*energies), wanted)


# datum 1 (label 1): f = log 2, samples exp(f) = 1, 1, 2; datum 2 (label 0): f = log 3, samples exp(f) = 2, 1, 3
HAND = {
    "none": ([1, 1, 2], [2, 1, 3]),
    "own": ([2, 1, 1, 2], [3, 2, 1, 3]),
    "batch": ([2, 1, 1, 1, 2], [1, 3, 2, 1, 3]),
}


@pytest.mark.parametrize("anchor", ANCHORS)
def test_candidates_by_hand(anchor):
    assert torch.allclose(objectives.candidates(F_POS, F_NEG, Y, anchor).exp(), torch.tensor(HAND[anchor]).double())


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_importance_weighted_by_hand(anchor, exponent):
    phases = []
    for terms in HAND[anchor]:
        if exponent == 0:
            phases.append(sum(map(math.log, terms)) / len(terms))
        else:
            phases.append(math.log(sum(t**exponent for t in terms) / len(terms)) / exponent)
    wanted = (phases[0] - L2 + phases[1] - L3) / 2
    assert same(importance_weighted(F_POS, F_NEG, Y, anchor=anchor, exponent=exponent), wanted)


@pytest.mark.parametrize("exponent, weights", [(1.0, [1, 4, 4]), (0.5, [1, 2, 2]), (0.0, [1, 1, 1])])
def test_gradient_of_the_negative_phase_is_the_weights(exponent, weights):
    f = torch.tensor([0.0, math.log(4), math.log(4)], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(negative_phase(f, exponent), f)
    assert gradient.tolist() == pytest.approx([w / sum(weights) for w in weights])


def test_gradient_of_the_whole_batch_loss_by_hand():
    pos, neg = F_POS.clone().requires_grad_(), F_NEG.clone().requires_grad_()
    g_pos, g_neg = torch.autograd.grad(importance_weighted(pos, neg, Y, anchor="batch"), (pos, neg))
    # label 1 has weights 2, 1 | 1, 1, 2 of 7, label 0 has 1, 3 | 2, 1, 3 of 10; each datum counts for a half
    assert torch.allclose(g_pos, torch.tensor([[1 / 20, 2 / 14 - 0.5], [3 / 20 - 0.5, 1 / 14]]).double())
    assert torch.allclose(g_neg, torch.tensor([[2 / 20, 1 / 14], [1 / 20, 1 / 14], [3 / 20, 2 / 14]]).double())


def test_exponent_0_is_the_plain_average():
    leaf = F_NEG.clone().requires_grad_()
    (weighted,) = torch.autograd.grad(importance_weighted(F_POS, leaf, Y, anchor="none", exponent=0.0), leaf)
    assert torch.allclose(weighted, torch.full_like(weighted, 1 / 6))


@pytest.mark.parametrize("anchor, moves", [("none", True), ("own", False), ("batch", False)])
def test_far_samples_are_ignored_with_an_anchor(anchor, moves):
    pos, far = F_POS[:1].clone().requires_grad_(), (F_NEG - 60).requires_grad_()
    gradients = torch.autograd.grad(importance_weighted(pos, far, Y[:1], anchor=anchor), (pos, far))
    assert (max(float(g.abs().max()) for g in gradients) > 0.1) is moves
    if not moves:
        assert max(float(g.abs().max()) for g in gradients) < 1e-20


def test_the_anchored_loss_is_bounded_and_the_others_are_not():
    far = F_NEG - 1e4
    assert same(importance_weighted(F_POS[:1], far, Y[:1], anchor="own"), -math.log(4))
    assert importance_weighted(F_POS, far, Y, anchor="batch") >= -math.log(5)
    assert importance_weighted(F_POS, far, Y, anchor="none") < -9e3


def test_shifting_a_label_changes_nothing():
    """log p(x given y) does not know p(y): adding a constant to a column of logits leaves the loss alone."""
    shift = torch.tensor([3.0, -5.0], dtype=torch.float64)
    for anchor in ANCHORS:
        a = importance_weighted(F_POS, F_NEG, Y, anchor=anchor)
        assert same(importance_weighted(F_POS + shift, F_NEG + shift, Y, anchor=anchor), float(a))


def test_huge_logits_stay_finite():
    pos, neg = (F_POS + 5e4).float().requires_grad_(), (F_NEG - 5e4).float().requires_grad_()
    for anchor in ANCHORS:
        value = importance_weighted(pos, neg, Y, anchor=anchor)
        gradients = torch.autograd.grad(value, (pos, neg))
        assert value.isfinite() and all(g.isfinite().all() for g in gradients)


def test_effective_samples():
    f = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, -99.0, -99.0, -99.0], [L3, 0.0, -99.0, -99.0]], dtype=torch.float64)
    assert objectives.effective_samples(f).tolist() == pytest.approx([4, 1, 16 / 10])
    assert objectives.effective_samples(f, 0.0).tolist() == pytest.approx([4, 4, 4])


def test_mutual_information():
    certain = torch.tensor([[50.0, -50.0], [-50.0, 50.0]], dtype=torch.float64)
    assert same(objectives.mutual_information(certain), L2)
    assert same(objectives.mutual_information(certain[:1].expand(4, 2)), 0)
    f = torch.tensor([[L3, 0.0], [0.0, L3]], dtype=torch.float64)  # posteriors 3/4, 1/4: log 2 - H(1/4)
    assert same(objectives.mutual_information(f), L2 + 0.75 * math.log(0.75) + 0.25 * math.log(0.25))


def test_energy_l2():
    assert same(objectives.energy_l2(torch.tensor([1.0, 3.0]), torch.tensor([2.0])), 5 + 4)


# --- the method table ---------------------------------------------------------------------------------------

TERMS = {
    "softmax": {"nll"},
    "jem": {"nll", "generative"},
    "jem_joint": {"generative"},
    "st_jem": {"nll", "generative", "effective_samples"},
    "st_jem_own": {"nll", "generative", "effective_samples"},
    "st_jem_none": {"nll", "generative", "effective_samples"},
    "st_jem_plain": {"nll", "generative"},
    "st_jem_mi": {"nll", "generative", "effective_samples", "mutual_information"},
}


def by_hand(name):
    nll = objectives.cross_entropy(F_POS, Y)
    e_pos, e_neg = energy_from_logits(F_POS), energy_from_logits(F_NEG)
    joint = -(L2 + L3) / 2 + (L2 + 0 + L3) / 3
    weighted = {a: importance_weighted(F_POS, F_NEG, Y, anchor=a) for a in ANCHORS}
    return {
        "softmax": nll,
        "jem": nll + e_pos.mean() - e_neg.mean(),
        "jem_joint": joint,
        "st_jem": nll + weighted["batch"],
        "st_jem_own": nll + weighted["own"],
        "st_jem_none": nll + weighted["none"],
        "st_jem_plain": nll + joint,
        "st_jem_mi": nll + weighted["batch"] - 0.1 * objectives.mutual_information(F_NEG),
    }[name]


@pytest.mark.parametrize("name", METHODS)
def test_method_rows(name):
    row = METHODS[name]
    labels = Y_NEG if row.conditional else None
    value, metrics = loss(row, F_POS, Y, F_NEG if row.samples else None, labels)
    assert same(value, float(by_hand(name)))
    energies = {"energy_data", "energy_samples", "energy_gap"} if row.samples else set()
    assert set(metrics) == TERMS[name] | energies
    assert all(m.dim() == 0 and not m.requires_grad for m in metrics.values())
    if row.samples:
        gap = energy_from_logits(F_NEG).mean() - energy_from_logits(F_POS).mean()
        assert same(metrics["energy_gap"], float(gap))


def test_options_of_a_row():
    assert set(METHODS) == set(TERMS)
    tempered, _ = loss(replace(METHODS["st_jem"], exponent=0.5), F_POS, Y, F_NEG)
    nll = objectives.cross_entropy(F_POS, Y)
    assert same(tempered, float(nll + importance_weighted(F_POS, F_NEG, Y, exponent=0.5)))
    on_data, _ = loss(replace(METHODS["st_jem_mi"], mi_on="data", mi_weight=2.0), F_POS, Y, F_NEG)
    assert same(on_data, float(by_hand("st_jem") - 2 * objectives.mutual_information(F_POS)))
    ridge, metrics = loss(replace(METHODS["jem"], energy_l2=0.5), F_POS, Y, F_NEG)
    square = energy_from_logits(F_POS).square().mean() + energy_from_logits(F_NEG).square().mean()
    assert same(ridge, float(by_hand("jem") + 0.5 * square)) and same(metrics["energy_l2"], float(square))


@pytest.mark.parametrize(
    "wrong",
    [{"generative": "y"}, {"anchor": "all"}, {"exponent": 1.5}, {"exponent": 1e-6}, {"mi_on": "both"}],
    ids=lambda w: next(iter(w)),
)
def test_wrong_rows_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Method(**wrong)


def test_wrong_names_are_refused():
    with pytest.raises(ValueError, match="st_jem"):
        method("stjem")
    with pytest.raises(ValueError, match="anchor"):
        importance_weighted(F_POS, F_NEG, Y, anchor="all")
    with pytest.raises(ValueError, match="exponent"):
        negative_phase(F_POS, -0.1)
