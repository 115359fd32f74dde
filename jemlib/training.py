"""The training loop: one loop for every method, with monitors, divergence as a result, checkpoints and resume.

The loop knows no method by name: `TrainConfig.objective()` is a row of `objectives.METHODS`, and its terms say
whether chains are run. A run ends as "ok" or as "diverged at step n"; it is never restarted or mended on the way.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from jemlib import distributed, nets, objectives, precision
from jemlib.chains import chain_runner, class_gaussians
from jemlib.checkpoints import CheckpointError, load_checkpoint, save_checkpoint
from jemlib.config import ConfigError, TrainConfig, learning_rate
from jemlib.data import Labelled
from jemlib.energy import JEM, energy_from_logits
from jemlib.images import augment
from jemlib.progress import Progress
from jemlib.sampler import ReplayBuffer, SGLDHealth

#: draws a class that fresh chains start from, where they do not start from uniform noise
_STARTS_PER_CLASS = 1000


@dataclass
class FitResult:
    """A finished run. `model` and `buffer` are those of the last good checkpoint where the run diverged."""

    config: TrainConfig
    model: JEM
    buffer: ReplayBuffer | None
    status: str  #: "ok" or "diverged at step n"
    diverged_at: int | None
    history: list[dict[str, float]] = field(repr=False)  #: one row per log_every iterations: means over them
    seconds: float = 0.0  #: spent in training steps, all sittings together
    steps_done: int = 0
    precision: str = "float32"  #: what the network computed in, here and now
    trained_now: bool = True  #: False where a finished checkpoint was found

    @property
    def ms_per_step(self) -> float:
        """Mean wall time of a training iteration, in milliseconds."""
        return 1e3 * self.seconds / max(self.steps_done, 1)


def build_model(config: TrainConfig, shape: tuple[int, ...], n_classes: int) -> JEM:
    """The config's network for inputs of `shape`, initialized from the config's seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if config.network == "mlp":
            options = {"width": config.width, "depth": config.depth, "input_scale": config.input_scale}
            return JEM(nets.mlp(n_classes, n_features=shape[0], **options))
        if config.network == "wide_resnet":
            options = {"channels": shape[0], "depth": config.depth, "width": config.width}
            return JEM(nets.wide_resnet(n_classes, **options))
        options = {"channels": shape[0], "size": shape[1], "width": config.width, "features": config.features}
        return JEM(nets.conv_net(n_classes, **options))


def pick_device(name: str) -> torch.device:
    """The named device; "auto" takes CUDA, then Apple's MPS, then the CPU. ConfigError for one that is not here."""
    if name == "cpu":
        return torch.device(name)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return accelerator or torch.device("cpu")
    there = ["cpu"]
    if accelerator is not None:
        there += [accelerator.type, *(f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count()))]
    if name not in there:
        raise ConfigError(f"there is no device {name!r} here; choose from auto, {', '.join(there)}")
    return torch.device(name)


def fit(
    config: TrainConfig,
    train: Labelled,
    n_classes: int,
    *,
    checkpoint: Path | None = None,
    data_id: str = "",
    force: bool = False,
    evaluate: Callable[[JEM], dict[str, float]] | None = None,
    proposals: Tensor | None = None,
    label: str = "",
    lines: int = 4,
) -> FitResult:
    """Train a model by `config` on `train`, resuming from `checkpoint` where it holds the same run.

    checkpoint: file to write (None: keep nothing); one that is finished is returned without training unless `force`.
    evaluate: called with the model at every log point; its numbers join the history. proposals: (M, ...) fixed
    negatives in place of a sampler; every point of a grid makes the weighted estimator exact. lines: of progress
    that a log keeps. Under torchrun the processes share the work and return equal results; the first one writes the
    checkpoint, where all must be able to read it. Raises ValueError for data that this network cannot be trained on
    (shapes, types, values outside [-1, 1], labels outside 0..n_classes - 1, too few), CheckpointError for a checkpoint
    of another run.
    """
    _check(config, train, n_classes)
    checkpoint = None if checkpoint is None else Path(checkpoint)
    run = _Run(config, train, n_classes, data_id, proposals)
    resumed = False
    run.world.barrier()  # so that all processes find the same checkpoint, or none
    if checkpoint is not None and checkpoint.exists() and not force:
        run.load(load_checkpoint(checkpoint), checkpoint)
        resumed = True
    run.world.barrier()
    writes = checkpoint is not None and run.world.rank == 0
    if run.status != "running":
        Progress(label or config.method, config.n_iterations, lines).replay(run.history, run.status)
        return run.result(trained_now=False)
    last_good = run.state()
    if writes and not resumed:
        save_checkpoint(checkpoint, last_good)
    with Progress(label or config.method, config.n_iterations, lines, start=run.step) as progress:
        while run.step < config.n_iterations:
            started = time.perf_counter()
            alive = run.iterate()
            run.seconds += time.perf_counter() - started
            if not alive:
                # the row that shows what happened is kept; weights and chains go back to the last good state
                failed = {"history": run.history, "status": f"diverged at step {run.step}", "diverged_at": run.step}
                failed["seconds"], failed["steps_timed"] = run.seconds, run.step + 1
                last_good |= failed
                run.load(last_good, checkpoint)
                break
            run.step += 1
            if run.step % config.log_every == 0 or run.step == config.n_iterations:
                run.log(evaluate)
                progress.update(run.step, run.history[-1])
            if run.step == config.n_iterations:
                run.status = "ok"
            if run.step % config.checkpoint_every == 0 or run.status == "ok":
                last_good = run.state()
                if writes and run.status != "ok":
                    save_checkpoint(checkpoint, last_good)
        if writes:
            save_checkpoint(checkpoint, last_good)
        progress.close(run.status)
    run.world.barrier()  # whoever reads the checkpoint next finds the last one
    return run.result(trained_now=True)


def _check(config: TrainConfig, train: Labelled, n_classes: int) -> None:
    """One sentence, as ValueError, for data that a run of this config cannot be trained on."""
    x, y = train
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)) or x.dtype != torch.float32 or y.dtype != torch.int64:
        kinds = (str(getattr(part, "dtype", type(part).__name__)) for part in train)
        raise ValueError(f"training data are tensors, x of float32 and y of int64, not {' and '.join(kinds)}")
    if y.dim() != 1 or len(x) != len(y):
        raise ValueError(f"there must be one label for each input: x (N, ...) and y (N,), not {x.shape} and {y.shape}")
    wanted = "(N, features)" if config.network == "mlp" else "(N, channels, size, size)"
    if x.dim() != wanted.count(",") + 1:
        raise ValueError(f"the network {config.network} takes inputs {wanted}, not {tuple(x.shape)}")
    if config.network == "conv_net" and (x.shape[2] != x.shape[3] or x.shape[2] % 2):
        raise ValueError(f"conv_net takes square images of an even size, not {x.shape[2]} x {x.shape[3]}")
    if len(x) < config.batch_size:
        raise ValueError(f"batch_size {config.batch_size} is larger than the {len(x)} training data")
    if not bool(torch.isfinite(x).all()) or x.min() < -1 or x.max() > 1:
        raise ValueError("training inputs must be finite and lie in [-1, 1], the range of the chains")
    if not 0 <= int(y.min()) <= int(y.max()) < n_classes:
        raise ValueError(f"labels must lie in 0..{n_classes - 1}")


class _Run:
    """The moving parts of one training run: everything here that changes is in a checkpoint."""

    _PLAIN = (
        *("hash", "step", "status", "diverged_at", "order", "position"),
        *("history", "sums", "seconds", "steps_timed"),
    )

    def __init__(self, config: TrainConfig, train: Labelled, n_classes: int, data_id: str, proposals: Tensor | None):
        self.config, self.method, self.hash = config, config.objective(), config.hash(data_id)
        if proposals is not None:  # they take the sampler's place, so they are part of what the run is
            self.hash += hashlib.sha256(proposals.cpu().contiguous().numpy().tobytes()).hexdigest()[:12]
        self.world, self.device = distributed.join(pick_device(config.device))
        if config.batch_size % self.world.size:
            raise ValueError(f"batch_size {config.batch_size} cannot be split among {self.world.size} processes")
        if proposals is not None and self.world.size > 1:
            raise ValueError("fixed proposals are for one process; start this run without torchrun")
        self.dtype = precision.choose(config.precision, self.device, config.network)
        precision.prepare(config.precision, self.device)
        self.train = Labelled(train.x.to(self.device), train.y.to(self.device))
        shape = tuple(train.x.shape[1:])
        self.model = build_model(config, shape, n_classes).to(self.device)
        fused = {"fused": True} if self.device.type == "cuda" else {}
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.lr, betas=(config.beta1, 0.999), **fused)
        # separate streams: what the sampler draws never changes which data a method sees
        self.rng_data = torch.Generator(self.device).manual_seed(2 * config.seed)
        self.rng_chains = torch.Generator(self.device).manual_seed(2 * config.seed + 1)
        self.proposals = None if proposals is None else proposals.to(self.device)
        self.buffer = None
        if self.method.samples and proposals is None:
            self.buffer = self.fresh_buffer(shape, n_classes)
            self.move = chain_runner(self.model, config, self.rng_chains, self.world)
        self.order = torch.empty(0, dtype=torch.long, device=self.device)
        self.position = 0
        self.step = self.steps_timed = 0
        self.seconds = 0.0
        self.status, self.diverged_at = "running", None
        self.history: list[dict[str, float]] = []
        self.sums: dict[str, Tensor] = {}

    def fresh_buffer(self, shape: tuple[int, ...], n_classes: int) -> ReplayBuffer:
        """Chains as the run begins, by the config's `chain_start`."""
        size, conditional = self.config.buffer_size, self.method.conditional
        if self.config.chain_start == "uniform":
            options = {"n_classes": n_classes if conditional else None, "device": self.device}
            return ReplayBuffer.uniform(size, shape, generator=self.rng_chains, **options)
        starts = class_gaussians(self.train, n_classes, _STARTS_PER_CLASS, self.rng_chains)
        options = {"labelled": conditional, "generator": self.rng_chains, "low": -1.0, "high": 1.0}
        return ReplayBuffer.from_starts(size, starts, **options)

    def next_batch(self) -> tuple[Labelled, Tensor | None]:
        """The next mini-batch of a shuffled pass; the rest that fills no batch joins no step.

        Returns (batch, what the classifier sees in its place: augmented inputs where the other terms take plain ones).
        """
        if self.position + self.config.batch_size > len(self.order):
            self.order = torch.randperm(len(self.train.x), generator=self.rng_data, device=self.device)
            self.position = 0
        index = self.order[self.position : self.position + self.config.batch_size]
        self.position += self.config.batch_size
        x, y = self.train.x[index], self.train.y[index]
        # the same draws for every method, so that all see the same augmented images
        augmented = None if self.config.augment == "none" else augment(x, self.rng_data)
        if self.config.input_noise:
            noise = torch.empty_like(x).normal_(std=self.config.input_noise, generator=self.rng_data)
            x = (x + noise).clamp(-1, 1)
            augmented = None if augmented is None else (augmented + noise).clamp(-1, 1)
        if augmented is None or (self.config.augment == "classifier" and self.method.samples):
            return Labelled(x, y), augmented
        return Labelled(augmented, y), None

    def negatives(self) -> tuple[Tensor, Tensor | None, SGLDHealth | None]:
        """Samples, their labels and the sampler's health: the fixed proposals, or chains moved by SGLD.

        Of several processes each has its share of the samples, and all labels.
        """
        config, world = self.config, self.world
        if self.proposals is not None:
            return self.proposals, None, None
        options = {"reinit_prob": config.reinit_prob, "generator": self.rng_chains}
        index, x, y = self.buffer.draw(config.batch_size, **options)
        x, health = self.move(world.mine(x), None if y is None else world.mine(y))
        self.buffer.put(index, torch.cat(world.gather(x)))
        return x, y, health if world.size == 1 else health.merged(world.mean)

    def iterate(self) -> bool:
        """One training iteration; False, with the weights untouched, where energies or gradients ran away."""
        config, device = self.config, self.device
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, self.step)
        batch, x_class = self.next_batch()
        x_neg = y_neg = health = None
        if self.method.samples:
            x_neg, y_neg, health = self.negatives()
        self.model.train()
        # one forward pass over data, samples and the classifier's own view of the data, where there is one
        mine, view = self.world.mine, x_class if self.method.classify else None
        parts = {"f_pos": mine(batch.x), "f_neg": x_neg, "f_class": None if view is None else mine(view)}
        parts = {name: x for name, x in parts.items() if x is not None}
        with precision.autocast(self.dtype, device):
            logits = self.model.logits(torch.cat(list(parts.values())))
        # every process has the loss of the whole batch, and the graph of its share
        shares = zip(*(f.split([len(x) for x in parts.values()]) for f in self.world.gather(logits)), strict=True)
        split = dict(zip(parts, map(torch.cat, shares), strict=True))
        loss, metrics = objectives.loss(self.method, y_pos=batch.y, y_neg=y_neg, **split)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.world.sum_gradients(self.model.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        worst = torch.stack([energy_from_logits(f.detach()).abs().max() for f in split.values()]).max()
        alive = bool(torch.isfinite(loss.detach()) & torch.isfinite(norm) & (worst <= config.energy_limit))
        metrics |= {"loss": loss.detach(), "gradient_norm": norm}
        if health is not None and config.n_steps > 0:
            metrics |= {f"sampler_{name}": value for name, value in health._asdict().items()}
        if not alive:
            self.sums = {}
            self._add(metrics)
            self._close_row(self.step + 1)
            return False
        self._add(metrics)
        self.optimizer.step()
        self.steps_timed = self.step + 1
        return True

    def _add(self, metrics: dict[str, Tensor]) -> None:
        for name, value in (metrics | {"_count": torch.ones((), device=self.device)}).items():
            self.sums[name] = self.sums.get(name, 0) + value

    def _close_row(self, step: int) -> None:
        count = self.sums.pop("_count").item()
        means = torch.stack([value / count for value in self.sums.values()]).tolist()  # one transfer, not one each
        self.history.append({"step": step} | dict(zip(self.sums, means, strict=True)))
        self.sums = {}

    def log(self, evaluate: Callable[[JEM], dict[str, float]] | None) -> None:
        """Close the row of monitors that covers the iterations since the last one."""
        self._close_row(self.step)
        if evaluate is not None:
            self.model.eval()
            with torch.no_grad():
                self.history[-1] |= evaluate(self.model)

    def state(self) -> dict:
        """Copies of everything that a resumed run needs to go on bit for bit."""
        live = {
            "config": self.config.model_dump(mode="json"),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "buffer": None if self.buffer is None else self.buffer.state_dict(),
            "device": self.device.type,
            "rng_data": self.rng_data.get_state(),
            "rng_chains": self.rng_chains.get_state(),
        }
        return copy.deepcopy(live | {name: getattr(self, name) for name in self._PLAIN})

    def load(self, state: dict, path: Path | None) -> None:
        """Take over a checkpoint's state; CheckpointError where it belongs to another run."""
        if state.get("hash") != self.hash:
            raise CheckpointError(
                f"{path} holds a run of another configuration ({state.get('hash')}, not {self.hash}); "
                "move it away, or train anew with --force"
            )
        unfinished, device = state.get("status") == "running", state.get("device", self.device.type)
        if unfinished and device != self.device.type:  # random streams of one kind of device are none of another
            raise CheckpointError(
                f"{path} holds an unfinished run that was started on {device}; go on there, or train anew with --force"
            )
        state = copy.deepcopy(state)
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if state["buffer"] is not None:
                self.buffer = ReplayBuffer.from_state(state["buffer"], self.device, self.buffer.starts)
            if unfinished:  # nothing is drawn after the end, which may be read on any device
                self.rng_data.set_state(state["rng_data"])
                self.rng_chains.set_state(state["rng_chains"])
            for name in self._PLAIN:
                setattr(self, name, state[name])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{path} was written by an earlier version of jemlib: move it away, or train anew with --force"
            ) from error
        self.order = self.order.to(self.device)
        self.sums = {name: value.to(self.device) for name, value in self.sums.items()}

    def result(self, trained_now: bool) -> FitResult:
        """What `fit` returns, with the model in eval mode."""
        self.model.eval()
        end = {"seconds": self.seconds, "steps_done": self.steps_timed, "trained_now": trained_now}
        end["precision"] = str(self.dtype).removeprefix("torch.")
        return FitResult(self.config, self.model, self.buffer, self.status, self.diverged_at, self.history, **end)
