"""Runs side by side give what runs one after the other give."""

import pytest
import torch

from jemlib import runs
from jemlib.checkpoints import load_checkpoint
from jemlib.config import TrainConfig
from jemlib.parallel import Task, train_all
from jemlib.results import Store
from jemlib.toy_runs import dataset, reference

BASE = {"network": "mlp", "width": 8, "n_iterations": 20, "batch_size": 16, "n_steps": 2, "step_size": 0.003}
BASE |= {"buffer_size": 50, "log_every": 5, "checkpoint_every": 5}


@pytest.fixture(scope="module")
def tasks():
    data = dataset("rings", 200, 0)
    configs = [TrainConfig(method=method, seed=seed, **BASE) for method in ("jem", "st_jem") for seed in (0, 1)]
    return [Task(data, config, {"evaluate": reference("rings", config.method, config, 16).score}) for config in configs]


@pytest.mark.timeout(120)
def test_workers_change_nothing(tasks, tmp_path):
    one, two = Store(tmp_path / "one", "01_x"), Store(tmp_path / "two", "01_x")
    before = torch.get_num_threads()
    alone = train_all(one, tasks, workers=1)
    beside = train_all(two, tasks, workers=2)
    assert torch.get_num_threads() == before
    assert (
        [name for name, _ in alone]
        == [name for name, _ in beside]
        == [runs.run_name(t.dataset, t.config) for t in tasks]
    )
    for (name, first), (_, second) in zip(alone, beside, strict=True):
        assert first.history == second.history
        assert all(map(torch.equal, first.model.state_dict().values(), second.model.state_dict().values()))
        assert torch.equal(load_checkpoint(two.checkpoint_path(name))["buffer"]["x"], first.buffer.x)
        assert two.read_record(name)["threads"] == 1
    again = train_all(two, tasks, workers=2)
    assert not any(result.trained_now for _, result in again)


@pytest.mark.timeout(120)
def test_an_error_in_a_worker_is_raised(tasks, tmp_path):
    bad = tasks[0]._replace(config=tasks[0].config.replace(batch_size=500, buffer_size=500))
    with pytest.raises(ValueError, match="larger than the 200 training data"):
        train_all(Store(tmp_path, "01_x"), [bad, tasks[1]], workers=2)
