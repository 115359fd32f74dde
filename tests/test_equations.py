"""Every row of the equation map, by equation; the checks are those that notebook 01 shows."""

import pytest

from jemlib import checks, equations

ROWS = {
    "densities": ["(1)", "(2)", "(2)"],
    "likelihood_gradients": ["(3)", "(4)", "(4)"],
    "langevin": ["(5)"] * 7,
    "classifier": ["(6), (7)", "(6), (7)", "(8)", "(9), (10)", "(11)"],
    "information": ["(12)-(14)"] * 3 + ["(13), A.3"] * 2 + ["(15)"],
    "conditional_likelihood": ["(16)", "(17)", "(17)"],
    "importance_sampling": ["(18)", "(18), (19)", "(19)"],
    "weights": ["(20)"] * 5,
    "optimum": ["(21)"] * 3,
}
#: the study's own figures, which no tolerance may exceed
LIMITS = {"(3)": 1e-6, "(4)": 1e-6, "(12)-(14)": 1e-10, "(15)": 1e-10, "(11)": 1e-10, "(18), (19)": 0.05}


@pytest.mark.parametrize("family", equations.FAMILIES, ids=lambda family: family.__name__)
def test_equation_holds(family):
    rows = list(family(checks.setup(seed=0)))
    assert [row.equation for row in rows] == ROWS[family.__name__]  # no row is lost
    for row in rows:
        assert row.holds, f"{row.equation} {row.quantity}: {row.error:.3g} > {row.tolerance:.3g}"
        assert row.tolerance <= LIMITS.get(row.equation, 1.0 if "standard errors" not in row.quantity else 4.0)


@pytest.mark.parametrize("family", equations.FAMILIES, ids=lambda family: family.__name__)
def test_equation_holds_for_another_model(family):
    assert all(row.holds for row in family(checks.setup(seed=7, n=18, n_classes=3)))


def test_nan_does_not_hold():
    assert not checks.Check("(1)", "", float("nan"), 1.0).holds


def test_fixed_points_are_as_predicted():
    table, curves = equations.fixed_points()
    failed = table["predicted"].str.startswith("none")
    assert set(table.loc[failed, "status"]) == {"diverged"} and failed.sum() == 2
    assert set(table.loc[~failed, "status"]) == {"converged"}
    assert (table.loc[~failed, "kl_to_prediction"] <= 1e-5).all()
    flat = table[(table["negatives"] == "weights") & (table["sampler"] == "perfect")]
    assert flat["kl_to_data"].item() > 0.05  # a prediction that everything meets would prove nothing
    assert len(curves) == 24 * len(table)
