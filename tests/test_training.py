"""The training loop: determinism, resume, divergence as a result, strict configuration."""

import json

import pytest
import torch

from jemlib import objectives, training
from jemlib.checkpoints import CheckpointError, load_checkpoint, save_checkpoint
from jemlib.config import ConfigError, TrainConfig, learning_rate
from jemlib.data import Labelled
from jemlib.training import fit

SMALL = {
    "network": "mlp",
    "width": 16,
    "n_iterations": 40,
    "batch_size": 16,
    "n_steps": 3,
    "step_size": 0.01,
    "buffer_size": 64,
    "input_noise": 0.01,
    "warmup": 5,
    "decay_at": (30,),
    "log_every": 7,
    "checkpoint_every": 6,
}


def small(method="st_jem", **changes):
    return TrainConfig(method=method, **(SMALL | changes))


@pytest.fixture(scope="module")
def blobs():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(200) % 2
    x = 0.4 * (2 * y[:, None] - 1) + 0.1 * torch.randn(200, 2, generator=generator)
    return Labelled(x.clamp(-1, 1), y)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def without_times(state):
    return {key: value for key, value in state.items() if key != "seconds"}


@pytest.mark.parametrize("method", objectives.METHODS)
def test_every_method_of_the_table_trains(method, blobs):
    result = fit(small(method), blobs, 2)
    assert result.status == "ok"
    assert result.history[-1]["step"] == 40
    assert (result.buffer is None) == (method == "softmax")
    assert result.config.temperature() == (None if method == "softmax" else 1.0)


def test_tables_name_the_network_by_its_size():
    sizes = [{}, {"network": "conv_net", "width": 32}, {"network": "conv_net", "width": 32, "features": 256}]
    sizes.append({"network": "wide_resnet", "depth": 28, "width": 10})
    names = [small(**size).network_name() for size in sizes]
    assert names == ["mlp-16-2", "conv_net-32", "conv_net-32-256", "WRN-28-10"]


def test_the_classifier_learns(blobs):
    result = fit(small("st_jem", n_iterations=150, lr=0.01), blobs, 2)
    assert (result.model(blobs.x).argmax(1) == blobs.y).float().mean() > 0.95


def test_two_runs_are_bit_identical_and_another_seed_is_not(blobs):
    first, second, other = (fit(small(seed=seed), blobs, 2) for seed in (0, 0, 1))
    assert first.history == second.history
    assert same(first.model.state_dict(), second.model.state_dict())
    assert first.history != other.history


def test_monitors_and_global_randomness_do_not_change_a_run(blobs):
    plain = fit(small(), blobs, 2)
    torch.manual_seed(123)
    watched = fit(small(), blobs, 2, evaluate=lambda model: {"draw": torch.rand(()).item()})
    assert same(plain.model.state_dict(), watched.model.state_dict())
    assert torch.equal(plain.buffer.x, watched.buffer.x)


def test_fit_leaves_global_randomness_alone(blobs):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    fit(small(n_iterations=3), blobs, 2)
    assert torch.equal(torch.rand(3), expected)


def test_all_methods_see_the_same_data_in_the_same_order(blobs):
    orders = [training._Run(small(method), blobs, 2, "", None) for method in ("softmax", "jem", "st_jem")]
    batches = [[run.next_batch()[0].x for _ in range(20)] for run in orders]
    assert same(batches[0], batches[1]) and same(batches[0], batches[2])


@pytest.mark.parametrize("stop", [1, 6, 13, 39])
def test_resume_equals_uninterrupted(stop, blobs, tmp_path):
    """Stopped by an exception at a step that is no checkpoint, then started again."""

    class Stop(Exception):
        pass

    whole = fit(small(), blobs, 2, checkpoint=tmp_path / "whole.pt")
    iterate, count = training._Run.iterate, 0

    def stopping(run):
        nonlocal count
        count += 1
        if count > stop:
            raise Stop
        return iterate(run)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(training._Run, "iterate", stopping)
        fit(small(), blobs, 2, checkpoint=tmp_path / "cut.pt")
    resumed = fit(small(), blobs, 2, checkpoint=tmp_path / "cut.pt")
    assert resumed.history == whole.history
    saved = [without_times(load_checkpoint(tmp_path / f"{name}.pt")) for name in ("whole", "cut")]
    assert same(*saved)


def test_a_finished_run_is_read_not_trained_again(blobs, tmp_path):
    path = tmp_path / "run.pt"
    first = fit(small(), blobs, 2, checkpoint=path)
    again = fit(small(), blobs, 2, checkpoint=path)
    assert first.trained_now and not again.trained_now
    assert same(first.model.state_dict(), again.model.state_dict())
    assert (again.history, again.seconds) == (first.history, first.seconds)
    assert fit(small(), blobs, 2, checkpoint=path, force=True).trained_now


def test_divergence_is_a_result(blobs, tmp_path):
    """The failed-sampler case of the theory: plain averages over uniform noise have no stationary point."""
    failing = small("jem", n_iterations=400, lr=0.05, n_steps=0, reinit_prob=1.0, energy_limit=50.0)
    result = fit(failing, blobs, 2, checkpoint=tmp_path / "run.pt")
    assert result.status == f"diverged at step {result.diverged_at}"
    assert 0 < result.diverged_at < 400
    assert all(p.isfinite().all() for p in result.model.parameters())
    assert result.history[-1]["step"] == result.diverged_at + 1
    last_good = fit(failing.replace(n_iterations=result.diverged_at // 6 * 6), blobs, 2)
    assert same(result.model.state_dict(), last_good.model.state_dict())
    again = fit(failing, blobs, 2, checkpoint=tmp_path / "run.pt")
    assert not again.trained_now and again.status == result.status and again.history == result.history
    weighted = fit(failing.replace(method="st_jem"), blobs, 2)
    assert weighted.status == "ok"


@pytest.mark.parametrize("changes", [{"lr": 1e4}, {"lr": 10.0, "step_size": 1e6}])
def test_absurd_settings_end_as_diverged_within_a_few_steps(changes, blobs):
    result = fit(small("jem", beta1=0.9, warmup=0, **changes), blobs, 2)
    assert result.status.startswith("diverged") and result.diverged_at < 30


def test_nan_in_the_loss_stops_before_the_weights_are_touched(blobs, monkeypatch):
    monkeypatch.setattr(objectives, "cross_entropy", lambda logits, y: logits.sum() * float("nan"))
    result = fit(small("softmax"), blobs, 2)
    assert result.diverged_at == 0
    assert all(p.isfinite().all() for p in result.model.parameters())


def test_a_checkpoint_of_another_run_is_named_not_loaded(blobs, tmp_path):
    path = tmp_path / "run.pt"
    fit(small(), blobs, 2, checkpoint=path)
    with pytest.raises(CheckpointError, match="another configuration"):
        fit(small(lr=0.5), blobs, 2, checkpoint=path)
    with pytest.raises(CheckpointError, match="another configuration"):
        fit(small(), blobs, 2, checkpoint=path, data_id="other data")


def test_a_run_of_another_device_is_read_where_it_is_finished_and_named_where_not(blobs, tmp_path):
    """A generator of CUDA has a state of 16 bytes, which none of the CPU takes."""
    path = tmp_path / "run.pt"
    first = fit(small(), blobs, 2, checkpoint=path)
    elsewhere = dict.fromkeys(("rng_data", "rng_chains"), torch.zeros(16, dtype=torch.uint8)) | {"device": "cuda"}
    state = load_checkpoint(path) | elsewhere
    save_checkpoint(path, state)
    again = fit(small(), blobs, 2, checkpoint=path)
    assert not again.trained_now and same(first.model.state_dict(), again.model.state_dict())
    save_checkpoint(path, state | {"status": "running"})
    with pytest.raises(CheckpointError, match="was started on cuda; go on there, or train anew with --force"):
        fit(small(), blobs, 2, checkpoint=path)
    del state["device"]  # as checkpoints were before
    save_checkpoint(path, state | {"status": "running"})
    with pytest.raises(CheckpointError, match="earlier version"):
        fit(small(), blobs, 2, checkpoint=path)


@pytest.mark.parametrize("name", ["gpu", "cuda", "cuda:0", "cpu:7", ""])
def test_a_device_that_is_not_there_is_one_sentence(name, blobs, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"no device '{name}' here; choose from auto, cpu$"):
        fit(small(device=name), blobs, 2)


def test_fixed_proposals_replace_the_sampler(blobs):
    grid = torch.cartesian_prod(*[torch.linspace(-1, 1, 20)] * 2)
    result = fit(small("st_jem_none"), blobs, 2, proposals=grid)
    assert result.status == "ok" and result.buffer is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Labelled(torch.zeros(8, 2), torch.zeros(8, dtype=torch.long)), "batch_size 16 is larger than the 8"),
        (Labelled(torch.full((50, 2), 1.5), torch.zeros(50, dtype=torch.long)), r"lie in \[-1, 1\]"),
        (Labelled(torch.full((50, 2), float("nan")), torch.zeros(50, dtype=torch.long)), "finite"),
        (Labelled(torch.zeros(50, 2), torch.full((50,), 2)), r"labels must lie in 0\.\.1"),
        (Labelled(torch.zeros(50, 2), torch.zeros(60, dtype=torch.long)), "one label for each input"),
        (Labelled(torch.zeros(50, 2), torch.zeros(50, 1, dtype=torch.long)), "one label for each input"),
        (Labelled(torch.zeros(50, 2), torch.zeros(50)), "y of int64, not torch.float32 and torch.float32"),
        (Labelled(torch.zeros(50, 2).double(), torch.zeros(50, dtype=torch.long)), "x of float32"),
        (Labelled([[0.0, 0.0]] * 50, [0] * 50), "are tensors"),
        (Labelled(torch.zeros(50, 1, 8, 8), torch.zeros(50, dtype=torch.long)), r"mlp takes inputs \(N, features\)"),
    ],
)
def test_unusable_data_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        fit(small(), data, 2)


@pytest.mark.parametrize("shape", [(50, 28, 28), (50, 1, 28, 20), (50, 784), (50, 1, 7, 7)])
def test_images_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="conv_net takes"):
        fit(small(network="conv_net"), Labelled(torch.zeros(shape), torch.zeros(50, dtype=torch.long)), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "st_jmm"}, "no method is called 'st_jmm'"),
        ({"learning_rate": 0.1}, "learning_rate"),
        ({"lr": -1.0}, "greater than 0"),
        ({"lr": float("nan")}, "finite"),
        ({"n_steps": 2.5}, "n_steps"),
        ({"anchor": "whole"}, "anchor"),
        ({"buffer_size": 8}, "smaller than batch_size"),
        ({"method": "softmax", "mi_weight": 0.1}, "softmax draws no samples"),
        ({"method": "softmax", "energy_l2": 0.1}, "softmax draws no samples"),
        ({"method": "jem", "anchor": "batch"}, "importance weights, which method jem has none of"),
        ({"method": "st_jem_plain", "exponent": 0.5}, "importance weights, which method st_jem_plain has none of"),
        ({"network": "mlp", "augment": "both"}, "augment='both' is for images"),
        ({"network": "wide_resnet", "depth": 12}, "the depth of a wide_resnet is 6n"),
    ],
)
def test_a_wrong_configuration_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**({"method": "st_jem"} | SMALL | changes))
    with pytest.raises(ConfigError, match=message):
        small().replace(**changes)


def test_overrides_change_the_row_and_the_hash():
    config = small(anchor="own", exponent=0.5, mi_weight=0.2)
    method = config.objective()
    assert (method.anchor, method.exponent, method.mi_weight) == ("own", 0.5, 0.2)
    assert config.hash() != small().hash() != small().hash("data")
    assert small(device="cpu").hash() == small().hash(), "the device does not name a run"
    assert json.loads(config.model_dump_json())["anchor"] == "own"


def test_learning_rate_schedule():
    config = small(lr=1.0, warmup=4, decay_at=(10, 20), decay_factor=0.1)
    rates = [learning_rate(config, step) for step in (0, 3, 9, 10, 19, 20)]
    assert rates == pytest.approx([0.25, 1.0, 1.0, 0.1, 0.1, 0.01])
