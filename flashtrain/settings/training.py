"""The groups optimizer, schedule and trainer: how a model is trained. A default of None is decided
when the run starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from flashtrain.errors import UserError, above, at_least, between
from flashtrain.settings.options import (
    CheckpointFormat,
    ContextGroups,
    ContextLayout,
    ContextMethod,
    Optimizer,
    OptimizerStates,
    Schedule,
    Strategy,
    option,
)


def no_options(group: str, name: str, options: Mapping[str, Any], ours: Collection[str]) -> None:
    """Raise UserError if `options` are given and `name` is one of flashtrain's own components
    (`ours`): only components that a program registers use them."""
    if options and name in ours:
        raise UserError(
            f"{group}.options={dict(options)} is used by registered {group}s, not by {name}. "
            f"Remove {group}.options."
        )


@dataclass
class OptimizerSettings:
    """The optimizer, which updates the weights (conf/optimizer)."""

    name: str = "adamw"  # adamw, lamb, muon, or one that your program registered
    learning_rate: float = 6e-4  # the learning rate at the schedule's peak
    # Decay rates of AdamW's two moments.
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    epsilon: float = 1e-8  # added to the denominator of AdamW's step
    # Decay of matrices, as a share of the learning rate; vectors have none.
    weight_decay: float = 0.1
    gradient_clip: float = 1.0  # bound of the gradients' global L2 norm; 0 switches it off
    momentum: float = 0.95  # momentum of optimizer=muon
    master_weights: bool = True  # update a float32 copy of weights that are bfloat16 (bf16-true)
    # AdamW's moments: full, 8bit (by torchao), or host: in its memory, where the step is computed.
    states: str = option("full", OptimizerStates)
    # options of a registered optimizer: +optimizer.options.A=1.
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        if self.states != "full" and self.name != "adamw":
            raise UserError(
                f"optimizer.states={self.states} needs optimizer=adamw, not {self.name}. "
                "Use optimizer.states=full."
            )
        no_options("optimizer", self.name, self.options, get_args(Optimizer))
        above("optimizer.learning_rate", self.learning_rate, 0)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optimizer.betas={list(self.betas)} must be two numbers in [0, 1).")
        at_least("optimizer.epsilon", self.epsilon, 0)
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        at_least("optimizer.gradient_clip", self.gradient_clip, 0)
        between("optimizer.momentum", self.momentum, 0.0, 1.0, include_high=False)


@dataclass
class ScheduleSettings:
    """The schedule of the learning rate (conf/schedule)."""

    name: str = "cosine"  # cosine, linear, constant, or one that your program registered
    # Steps of a linear rise to the peak; below 1: a share of the steps, at least one step; null:
    # 0.05.
    warmup_steps: int | float | None = None
    # The last learning rate as a share of the peak; 0 comes a step after the last.
    minimum_ratio: float = 0.1
    # options of a registered schedule: +schedule.options.A=1.
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        at_least("schedule.warmup_steps", self.warmup_steps, 0)
        between("schedule.minimum_ratio", self.minimum_ratio, 0.0, 1.0)
        no_options("schedule", self.name, self.options, get_args(Schedule))


@dataclass
class TrainerSettings:
    """The length, devices, validations and checkpoints of a training (conf/trainer)."""

    steps: int = 500  # optimizer steps of the training
    # Passes over the training data, which give the steps; null: trainer.steps.
    epochs: float | None = None
    tokens_per_step: int = 65536  # tokens of an optimizer step, over all devices
    # Samples that a device computes at once; null: as many as its free memory holds.
    micro_batch: int | None = None
    # Samples that a language model's validation computes at once; null: micro_batch.
    validation_micro_batch: int | None = None
    devices: int = 1  # devices of a machine
    nodes: int = 1  # machines that train together, under torchrun or SLURM
    # What devices share: ddp: samples; fsdp (FSDP2): weights too; context_parallel: weights and
    # each sequence; auto: ddp, or context_parallel where context_parallel= is given.
    strategy: str = option("auto", Strategy)
    # How devices share attention (strategy=context_parallel); auto: the least expected time.
    context_parallel_method: str = option("auto", ContextMethod)
    # Which device holds which tokens of a sequence (strategy=context_parallel).
    context_parallel_layout: str = option("balanced", ContextLayout)
    # Which devices share what (strategy=context_parallel): fixed: all of them each row; planned: as
    # many as pay each document of a micro-batch, if documents are masked.
    context_parallel_groups: str = option("fixed", ContextGroups)
    # Seconds without progress on a device that end the job (context_parallel); null: never.
    timeout_seconds: float | None = 1800.0
    compile: bool | None = None  # whether torch.compile compiles the model; null: on GPUs only
    # Whether a compiled step's launches are recorded and replayed, which helps small models.
    cuda_graphs: bool = False
    # true: the same command gives the same bits on the same GPU; on a CPU it always does.
    deterministic: bool = False
    log_every: int = 10  # steps between two logged rows
    validate_every: int = 100  # steps between two validations
    checkpoint_every: int = 100  # steps between two checkpoints
    # How many of the newest checkpoints before last.ckpt stay, as step-N.ckpt.
    keep_checkpoints: int = 0
    # A checkpoint of sharded weights: a file (training waits), or a folder to which every process
    # writes its part while training goes on (sharded); auto: sharded from 1e9 parameters on.
    checkpoint_format: str = option("auto", CheckpointFormat)
    # Minutes from the command's start after which the run saves and ends; resume=auto continues.
    max_minutes: float | None = None
    # Validations in a row without a better figure after which the training ends; null: never.
    early_stopping_patience: int | None = None
    # The figure of validations that early stopping follows; null: that of best.ckpt.
    early_stopping_monitor: str | None = None
    # Names that your program registered as callbacks.
    callbacks: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        """The number of processes over all nodes, one for each device."""
        return self.devices * self.nodes

    def check(self) -> None:
        for name in (
            "steps", "tokens_per_step", "micro_batch", "validation_micro_batch", "devices", "nodes",
            "log_every",
            "validate_every", "checkpoint_every", "early_stopping_patience",
        ):  # fmt: skip
            at_least(f"trainer.{name}", getattr(self, name), 1)
        at_least("trainer.keep_checkpoints", self.keep_checkpoints, 0)
        above("trainer.epochs", self.epochs, 0)
        if self.early_stopping_monitor is not None and self.early_stopping_patience is None:
            raise UserError("trainer.early_stopping_monitor needs trainer.early_stopping_patience.")
        above("trainer.max_minutes", self.max_minutes, 0)
        above("trainer.timeout_seconds", self.timeout_seconds, 0)
