"""What determines a training run: its configuration, checked and named by a hash."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from jemlib import nets, objectives
from jemlib.sampler import implied_temperature

#: raised whenever the same configuration comes to mean another computation, so that no older run passes for it
FORMAT = 2


class ConfigError(ValueError):
    """A configuration that cannot be: one sentence that names every value that is wrong."""


class TrainConfig(BaseModel):
    """Everything that determines a run; strict (an unknown name is an error) and immutable.

    Units: step_size and noise_std in those of x (data in [-1, 1]); energies in nats; decay_at in iterations.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    # objective: a row of the method table, and what overrides it
    method: str
    anchor: Literal["none", "own", "batch"] | None = None
    exponent: float | None = Field(None, ge=0, le=1)
    mi_weight: float | None = Field(None, ge=0)
    mi_on: Literal["samples", "data"] | None = None
    energy_l2: float | None = Field(None, ge=0)
    # network
    network: Literal["mlp", "conv_net", "wide_resnet"] = "conv_net"
    width: int = Field(16, gt=0)
    depth: int = Field(2, gt=0)
    input_scale: float = Field(1.0, gt=0)
    features: int = Field(0, ge=0)
    # optimizer: Adam
    seed: int = Field(0, ge=0, lt=2**62)
    n_iterations: int = Field(gt=0)
    batch_size: int = Field(64, gt=0)
    lr: float = Field(1e-3, gt=0)
    beta1: float = Field(0.0, ge=0, lt=1)
    warmup: int = Field(0, ge=0)
    decay_at: tuple[int, ...] = ()
    decay_factor: float = Field(0.3, gt=0, le=1)
    input_noise: float = Field(0.0, ge=0)
    augment: Literal["none", "classifier", "both"] = "none"
    # sampler
    n_steps: int = Field(10, ge=0)
    step_size: float = Field(1.0, gt=0)
    noise_std: float | None = Field(None, ge=0)
    max_rms_step: float | None = Field(None, gt=0)
    clip_grad: float | None = Field(None, gt=0)
    at_bounds: Literal["clamp", "reflect"] = "clamp"
    buffer_size: int = Field(10_000, gt=0)
    reinit_prob: float = Field(0.05, ge=0, le=1)
    chain_start: Literal["uniform", "class_gaussians"] = "uniform"
    # the run
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    energy_limit: float = Field(1e4, gt=0)
    log_every: int = Field(50, gt=0)
    checkpoint_every: int = Field(100, gt=0)
    device: str = "auto"

    def __init__(self, **values: object) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            wrong = (": ".join([*map(str, e["loc"]), e["msg"].removeprefix("Value error, ")]) for e in error.errors())
            raise ConfigError(f"no such training configuration: {'; '.join(wrong)}") from None

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        method = self.objective()  # raises for a name that is not in the table
        if method.samples and self.buffer_size < self.batch_size:
            raise ValueError(f"buffer_size {self.buffer_size} is smaller than batch_size {self.batch_size}")
        if not method.samples and (method.energy_l2 or (method.mi_weight and method.mi_on == "samples")):
            raise ValueError(f"method {self.method} draws no samples, which energy_l2 and mi_on='samples' are taken on")
        if method.generative != "x|y" and (self.anchor, self.exponent) != (None, None):
            raise ValueError(f"anchor and exponent are of importance weights, which method {self.method} has none of")
        if self.network == "mlp" and self.augment != "none":
            raise ValueError(f"augment={self.augment!r} is for images, which the network mlp does not take")
        if self.network == "wide_resnet":
            nets.blocks_per_stage(self.depth)  # raises for a depth that there is not
        return self

    def objective(self) -> objectives.Method:
        """The method's row with this config's overrides."""
        names = ("anchor", "exponent", "mi_weight", "mi_on", "energy_l2")
        overrides = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(objectives.method(self.method), **overrides)

    def network_name(self) -> str:
        """What a table calls the network: WRN-depth-width, conv_net-width[-hidden units], mlp-width-layers."""
        if self.network == "wide_resnet":
            return f"WRN-{self.depth}-{self.width}"
        last = self.depth if self.network == "mlp" else self.features
        return f"{self.network}-{self.width}" + (f"-{last}" if last else "")

    def temperature(self) -> float | None:
        """The temperature that step and noise imply, None for a method without chains."""
        if not self.objective().samples:
            return None
        return 1.0 if self.noise_std is None else implied_temperature(self.step_size, self.noise_std)

    def replace(self, **changes: object) -> TrainConfig:
        """A copy with other values, checked like the first (pydantic's own model_copy checks nothing)."""
        return TrainConfig(**(self.model_dump() | changes))

    def hash(self, data_id: str = "") -> str:
        """Twelve hex digits that name the run: this config (the device aside) on that data.

        precision="auto" names one run whatever the device makes of it, as device="auto" does; its record tells.
        """
        # the objective's terms too: a row of the method table may change under the same name
        whole = [FORMAT, self.model_dump(mode="json", exclude={"device"}), asdict(self.objective()), data_id]
        text = json.dumps(whole, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of iteration `step`: linear warm-up, then a factor at each milestone passed."""
    warm = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    return config.lr * warm * config.decay_factor ** sum(step >= milestone for milestone in config.decay_at)


def sampler_options(config: TrainConfig) -> dict:
    """The config's sampler as keyword arguments of `sgld`."""
    names = ("n_steps", "step_size", "noise_std", "max_rms_step", "clip_grad", "at_bounds")
    return {name: getattr(config, name) for name in names} | {"bounds": (-1.0, 1.0)}
