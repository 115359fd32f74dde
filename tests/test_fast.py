"""Precision, several processes, starts of chains: what may change how fast a run is, and not what it concludes."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from jemlib import precision, runs
from jemlib.chains import chain_runner, class_gaussians
from jemlib.config import TrainConfig
from jemlib.data import Labelled
from jemlib.graphs import graphed
from jemlib.input_gradient import FrozenJEM
from jemlib.provenance import repo_root
from jemlib.results import Store
from jemlib.sampler import ReplayBuffer, SGLDHealth, sgld
from jemlib.toy_runs import dataset, reference
from jemlib.training import build_model, fit

CPU = torch.device("cpu")


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def images(n, seed=0):
    y = torch.arange(n) % 10
    x = (y[:, None, None, None] / 5 - 1) * torch.ones(1, 1, 8, 8)
    return Labelled((x + 0.3 * torch.randn(n, 1, 8, 8, generator=rng(seed))).clamp(-1, 1), y)


IMAGES = {"network": "conv_net", "width": 8, "n_iterations": 6, "batch_size": 12, "n_steps": 3, "step_size": 1.0}
IMAGES |= {"noise_std": 0.01, "buffer_size": 60, "input_noise": 0.02, "log_every": 2, "max_rms_step": 0.1}


# --- names of runs ------------------------------------------------------------------------------------------


def test_the_runs_of_the_reference_have_the_names_of_their_configs():
    store = Store("results/reference", "x")
    tables = ("mnist_methods", "cifar10_methods", "anchor_ablation")
    names = {name for table in tables for name in store.read_table(table)["run"]}
    assert len(names) > 10
    for name in names:
        record = store.read_record(name)
        data_id = f"{record['data']['name']}:{record['data']['checksum']}:{record['n_train']}"
        assert TrainConfig(**record["config"]).hash(data_id) == record["config_hash"], name


def test_every_option_names_a_run_of_its_own():
    base = TrainConfig(method="jem", **IMAGES)
    others = [{"precision": "float32"}, {"precision": "bfloat16"}, {"chain_start": "class_gaussians"}]
    assert len({base.hash(), *(base.replace(**other).hash() for other in others)}) == 4


# --- precision ----------------------------------------------------------------------------------------------


def test_auto_takes_what_the_device_has(monkeypatch):
    for has, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(precision, "has_bfloat16", lambda device, has=has: has)
        assert precision.choose("auto", CPU, "conv_net") is dtype
        assert precision.choose("auto", CPU, "mlp") is torch.float32
    assert precision.choose("bfloat16", CPU, "mlp") is torch.bfloat16
    assert precision.choose("float32", CPU, "wide_resnet") is torch.float32
    monkeypatch.undo()
    assert not precision.has_bfloat16(torch.device("mps"))


def test_on_cuda_convolutions_repeat():
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = matmul.allow_tf32
    with cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True):
        precision.prepare("float32", CPU)
        assert (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32) == (True, False, True)
        precision.prepare("float32", torch.device("cuda"))
        assert (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32) == (False, True, False)
    matmul.allow_tf32 = before


def test_a_bfloat16_run_keeps_weights_chains_and_losses_in_float32():
    result = fit(TrainConfig(method="st_jem", precision="bfloat16", **IMAGES), images(60), 10)
    exact = fit(TrainConfig(method="st_jem", precision="float32", **IMAGES), images(60), 10)
    assert (result.precision, exact.precision) == ("bfloat16", "float32")
    assert {p.dtype for p in result.model.parameters()} == {result.buffer.x.dtype} == {torch.float32}
    for name in ("loss", "energy_data", "energy_samples"):
        assert result.history[-1][name] == pytest.approx(exact.history[-1][name], rel=0.02, abs=0.02)
        assert result.history[-1][name] != exact.history[-1][name]


@pytest.mark.slow
def test_bfloat16_changes_no_conclusion_on_the_toy():
    """KL to the data, gap and accuracy: the means of three seeds differ by less than seeds do, or by rounding."""
    data = dataset("rings", 4000, 0)
    options = {"network": "mlp", "width": 32, "input_scale": 5.0, "n_iterations": 120, "batch_size": 128, "lr": 0.025}
    options |= {"beta1": 0.9, "decay_at": (60, 100), "n_steps": 4, "step_size": 0.003, "at_bounds": "reflect"}
    options |= {"buffer_size": 1000, "reinit_prob": 0.01, "log_every": 50}
    found = {}
    for name in ("float32", "bfloat16"):
        rows = []
        for seed in range(3):
            config = TrainConfig(method="st_jem", seed=seed, precision=name, **options)
            result = fit(config, data.train, len(data.classes))
            score = reference("rings", "st_jem", config, 48).score(result.model)
            right = (result.model(data.test.x).argmax(1) == data.test.y).float().mean().item()
            assert result.status == "ok"
            rows.append([score["kl_nats"], score["kl_to_optimum"], result.history[-1]["energy_gap"], right])
        found[name] = torch.tensor(rows)
    spread = torch.maximum(found["float32"].std(0), torch.tensor([0.01, 0.01, 0.05, 0.005]))
    difference = (found["float32"].mean(0) - found["bfloat16"].mean(0)).abs()
    assert (difference < 2 * spread).all(), (found, spread)


# --- the sampler as one function ----------------------------------------------------------------------------


def test_a_runner_follows_the_weights_and_is_sgld():
    config = TrainConfig(method="st_jem", **IMAGES)
    x, y = images(12)
    model = build_model(config, (1, 8, 8), 10)
    for name in ("float32", "bfloat16"):
        generator = rng(5)
        move = chain_runner(model, config.replace(precision=name), generator)
        before, _ = move(x, y)
        with torch.no_grad():
            model.backbone[-1].weight.normal_(generator=rng(6)).mul_(2 if name == "float32" else 1)
        generator.manual_seed(5)
        moved, _ = move(x, y)
        anew, _ = chain_runner(model, config.replace(precision=name), rng(5))(x, y)
        assert torch.equal(moved, anew) and not torch.equal(moved, before)
    fresh, _ = chain_runner(model, config.replace(precision="float32"), rng(5), n_steps=2)(x, None)
    options = {"step_size": 1.0, "noise_std": 0.01, "max_rms_step": 0.1, "bounds": (-1.0, 1.0), "n_steps": 2}
    assert torch.equal(fresh, sgld(FrozenJEM(model), x, **options, generator=rng(5))[0])
    assert torch.allclose(fresh, sgld(model, x, **options, generator=rng(5))[0], atol=1e-5)


def test_graphs_are_for_cuda_alone():
    assert graphed(len, rng()) is len


def test_shares_of_a_batch_move_as_the_whole_does():
    config = TrainConfig(method="st_jem", **IMAGES)
    model, (x, y) = build_model(config, (1, 8, 8), 10), images(12)
    whole, health = chain_runner(model, config, rng())(x, y)
    parts = [chain_runner(model, config, rng(), (i, 3))(x[4 * i :][:4], y[4 * i :][:4]) for i in range(3)]
    assert torch.allclose(torch.cat([part for part, _ in parts]), whole, atol=1e-5)
    healths = [SGLDHealth(*h) for _, h in parts]
    squared = torch.stack([torch.stack([*h._replace(rms_step=h.rms_step.square())]) for h in healths])
    merged = healths[0].merged(lambda _: squared.mean(0))
    assert torch.allclose(torch.stack([*merged]), torch.stack([*health]), rtol=1e-4)


# --- starts -------------------------------------------------------------------------------------------------


def test_class_gaussians_have_the_moments_of_the_classes():
    generator = rng()
    y = torch.arange(4000) % 2
    x = torch.randn(4000, 2, generator=generator) @ torch.tensor([[0.1, 0.05], [0.0, 0.02]]) + 0.3 * y[:, None]
    draws = class_gaussians(Labelled(x, y), 2, 20_000, generator)
    for k in range(2):
        assert torch.allclose(draws[k].mean(0), x[y == k].mean(0), atol=0.005)
        assert torch.allclose(draws[k].T.cov(), x[y == k].T.cov(), rtol=0.1, atol=2e-4)
    with pytest.raises(ValueError, match="class 2 has none"):
        class_gaussians(Labelled(x, y), 3, 5, generator)


@pytest.mark.parametrize("labelled", [True, False])
def test_fresh_chains_start_at_their_class(labelled):
    starts = torch.arange(3.0)[:, None, None].expand(3, 5, 1)
    options = {"labelled": labelled, "generator": rng(), "low": -1.0, "high": 1.0}
    buffer = ReplayBuffer.from_starts(300, starts, **options)
    assert torch.equal(buffer.x[:, 0], torch.arange(300.0) % 3)
    buffer.put(torch.arange(300), torch.full((300, 1), 9.0))
    index, x, y = buffer.draw(300, reinit_prob=0.5, generator=rng())
    fresh = x[:, 0] != 9
    assert 100 < fresh.sum() < 200 and set(x[fresh, 0].tolist()) == {0.0, 1.0, 2.0}
    assert (y is None) == (not labelled)
    if labelled:
        assert torch.equal(x[fresh, 0].long(), y[fresh]) and torch.equal(y, index % 3)


def test_a_run_with_informative_starts_resumes_bit_for_bit(tmp_path):
    config = TrainConfig(method="jem", chain_start="class_gaussians", reinit_prob=0.5, checkpoint_every=2, **IMAGES)
    whole = fit(config, images(60), 10)

    class Stop(Exception):
        pass

    def stop(model):
        raise Stop

    with pytest.raises(Stop):
        fit(config.replace(log_every=3), images(60), 10, checkpoint=tmp_path / "a.pt", evaluate=stop)
    resumed = fit(config.replace(log_every=3), images(60), 10, checkpoint=tmp_path / "a.pt")
    assert torch.equal(whole.buffer.x, resumed.buffer.x)


# --- monitors -----------------------------------------------------------------------------------------------


def test_losses_are_bit_identical_with_and_without_monitors(monkeypatch):
    config = TrainConfig(method="st_jem", **IMAGES)
    watched = fit(config, images(60), 10, evaluate=lambda model: {"energy": model.energy(images(30).x).mean().item()})
    again = fit(config, images(60), 10)
    monkeypatch.setattr("jemlib.sampler._log_acceptance", lambda start, end: end.energy - math.inf)
    bare = fit(config, images(60), 10)
    losses = [[row["loss"] for row in run.history] for run in (watched, again, bare)]
    assert losses[0] == losses[1] == losses[2]
    assert bare.history[-1]["sampler_acceptance"] == 0 != again.history[-1]["sampler_acceptance"]


# --- several processes --------------------------------------------------------------------------------------

_SCRIPT = """
import json, sys
import torch
from jemlib import runs
from jemlib.config import TrainConfig
from jemlib.data import Dataset, Labelled
from jemlib.results import Store
torch.set_num_threads(1)
train = Labelled(*torch.load(sys.argv[1], weights_only=True))
data = Dataset("tiny", "made", "0", tuple("0123456789"), train, train, train)
for text in sys.argv[3:]:
    runs.train(Store(sys.argv[2], "x"), data, TrainConfig(**json.loads(text)))
"""


def trained(folder, configs, processes):
    """The results of the configs, trained by `processes` processes through torchrun, or by this interpreter's child."""
    (folder / "script.py").write_text(_SCRIPT)
    torch.save(list(images(60)), folder / "data.pt")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *launcher, folder / "script.py", folder / "data.pt", folder / "results"]
    environment = os.environ | {"PYTHONPATH": str(repo_root()), "OMP_NUM_THREADS": "1", "JEMLIB_PROGRESS": "lines"}
    texts = [json.dumps(config.model_dump(mode="json")) for config in configs]
    done = subprocess.run([*command, *texts], env=environment, capture_output=True, text=True)
    return done


@pytest.mark.slow
def test_two_processes_equal_one_on_the_same_global_batch(tmp_path):
    exact = IMAGES | {"precision": "float32"}
    configs = [
        TrainConfig(method="st_jem", **exact),
        TrainConfig(method="jem", augment="classifier", **exact),
        TrainConfig(method="st_jem_mi", chain_start="class_gaussians", **exact),
        TrainConfig(method="softmax", **exact),
    ]
    stores = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        done = trained(folder, configs, processes)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("st_jem seed 0: step 6/6") == 1, "one process speaks"
        stores.append(Store(folder / "results", "x"))
    for config in configs:
        name = f"tiny-{config.method}-s0-{config.hash('tiny:0:60')}"
        one, two = (store.read_record(name) for store in stores)
        assert (one["processes"], two["processes"]) == (1, 2)
        for a, b in zip(one["history"], two["history"], strict=True):
            rough = {"sampler_acceptance": 1e-3}  # differences of energies over a noise of 1e-4
            for key in a:
                assert a[key] == pytest.approx(b[key], rel=1e-4, abs=rough.get(key, 1e-4)), key
        weights = [runs.load_model(store, name).state_dict() for store in stores]
        for key in weights[0]:
            assert torch.allclose(weights[0][key], weights[1][key], atol=1e-3)


@pytest.mark.slow
def test_a_batch_that_cannot_be_split_is_refused(tmp_path):
    done = trained(tmp_path, [TrainConfig(method="st_jem", **(IMAGES | {"batch_size": 13}))], 2)
    assert done.returncode != 0 and "batch_size 13 cannot be split among 2 processes" in done.stderr
