"""The ablation: its cells, its counting, and that one cell can be run alone."""

import numpy as np
import pandas as pd
import pytest

from jemlib import ablation, figures_ablation, toy_runs
from jemlib.config import ConfigError
from jemlib.results import Store

BASE = {
    "network": "mlp",
    "width": 8,
    "n_iterations": 12,
    "batch_size": 16,
    "lr": 0.02,
    "n_steps": 2,
    "step_size": 0.003,
    "at_bounds": "reflect",
    "buffer_size": 50,
    "log_every": 4,
}


def test_arms_differ_in_the_objective_alone():
    cells = ablation.configs(BASE, ablation.ARMS, {"base": {}}, [0])
    left = [config.model_dump(exclude={"method", "exponent"}) for _, _, config in cells]
    assert all(other == left[0] for other in left)
    rows = [config.objective() for _, _, config in cells]
    assert len(set(rows)) == len(ablation.ARMS)
    assert {row.classify for row in rows} == {1.0} and all(row.conditional for row in rows)


def test_settings_are_typed_and_checked():
    found = ablation.settings("base; n_steps=1; reinit_prob=1, lr=0.1")
    assert list(found) == ["base", "n_steps=1", "reinit_prob=1, lr=0.1"]
    (_, _, config), *_ = ablation.configs(BASE, ["own"], {"x": found["reinit_prob=1, lr=0.1"]}, [3])
    assert (config.reinit_prob, config.lr, config.n_steps, config.seed) == (1.0, 0.1, 2, 3)
    with pytest.raises(ValueError, match="name=value"):
        ablation.settings("n_steps")
    with pytest.raises(ConfigError, match="n_stps"):
        ablation.configs(BASE, ["own"], ablation.settings("n_stps=1"), [0])
    with pytest.raises(ValueError, match="no arm is called 'whole'"):
        ablation.arms("own, whole")


def test_a_cell_run_alone_gives_the_same_numbers(tmp_path):
    data = toy_runs.dataset("rings", 200, 0)
    chosen = ablation.settings("base; n_steps=0")
    whole = ablation.toy(
        Store(tmp_path / "a", "04_x"), data, ablation.configs(BASE, ablation.ARMS, chosen, [0, 1]), 16, workers=1
    )
    assert len(whole) == 5 * 2 * 2
    row = whole.iloc[13]
    again = ablation.configs(BASE, [row["arm"]], ablation.settings(row["setting"]), [row["seed"]])
    alone = ablation.toy(Store(tmp_path / "b", "04_x"), data, again, 16, workers=1)
    pd.testing.assert_series_equal(alone.iloc[0], row, check_names=False)


ROWS = pd.DataFrame(
    {
        "dataset": "d",
        "arm": ["plain"] * 4 + ["batch"] * 2,
        "setting": ["s", "s", "t", "t", "s", "t"],
        "status": ["ok", "diverged at step 5", "diverged at step 2", "diverged at step 9", "ok", "ok"],
        "diverged_at": [np.nan, 5, 2, 9, np.nan, np.nan],
        "n_iterations": 10,
        "kl_nats": [1.0, 99.0, 99.0, 99.0, 2.0, 4.0],
    }
)


def test_survival_counts_every_run():
    curve = ablation.survival(ROWS).query("arm == 'plain'")
    assert curve["step"].tolist() == [0, 2, 5, 9, 10]
    assert curve["alive"].tolist() == [1.0, 0.75, 0.5, 0.25, 0.25]
    assert ablation.survival(ROWS).query("arm == 'batch'")["alive"].tolist() == [1.0, 1.0]


def test_summary_keeps_failures_and_leaves_their_numbers_out():
    cells = ablation.summary(ROWS, ["kl_nats", "frechet"]).set_index(["arm", "setting"])
    assert "frechet_mean" not in cells, "no row has it"
    assert cells.loc[("plain", "s"), ["kl_nats_mean", "alive", "seeds"]].tolist() == [1.0, 1, 2]
    assert np.isnan(cells.loc[("plain", "t"), "kl_nats_mean"]) and cells.loc[("plain", "t"), "seeds"] == 2
    verdict = ablation.verdict(ROWS).set_index("arm")
    assert verdict.loc["plain", "diverged in"] == "s; t" and verdict.loc["batch", "diverged in"] == "none"
    assert verdict.loc["batch", "best"] == "2 (s)" and verdict.loc["batch", "worst"] == "4 (t)"


def test_figures_name_the_dead_cells():
    _, alt = figures_ablation.cells(ablation.summary(ROWS, ["kl_nats"]), "kl_nats", "title", "KL, nats")
    assert "plain: 1 (1 of 2), diverged (0 of 2)" in alt
    _, alt = figures_ablation.survival(ablation.survival(ROWS), "title")
    assert "plain 25%, batch 100%" in alt


def test_claims_about_the_anchor_follow_the_runs():
    rows = [
        {"dataset": "d", "setting": "base", "arm": arm, "status": status, "accuracy": accuracy, "frechet": frechet}
        for arm, status, accuracy, frechet in [
            ("plain", "diverged at step 3", 0.1, 9.0), ("none", "ok", 0.8, 1.0), ("batch", "ok", 0.9, 2.0),
        ]
    ]  # fmt: skip
    found = ablation.claims(pd.DataFrame(rows))
    assert found["holds"].tolist() == [True, True, True, True, False]
    rows[2]["status"] = "diverged at step 5"
    assert ablation.claims(pd.DataFrame(rows))["holds"].tolist() == [True, True, False]
