"""The groups that say how a model is trained: optimizer, schedule and trainer. None: decided when the run starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from flashtrain.errors import UserError, above, at_least, between
from flashtrain.settings.options import (
    CheckpointFormat,
    ContextLayout,
    ContextMethod,
    Optimizer,
    OptimizerStates,
    Schedule,
    Strategy,
    option,
)


def no_options(group: str, name: str, options: Mapping[str, Any], ours: Collection[str]) -> None:
    """Raise UserError where one of our own components is given options, which those of a program alone read."""
    if options and name in ours:
        raise UserError(
            f"{group}.options={dict(options)} is used by registered {group}s alone, not by {name}. Remove it."
        )


@dataclass
class OptimizerSettings:
    """conf/optimizer. `gradient_clip` bounds the global L2 norm of the gradients; 0 leaves them as they are.

    `momentum` is muon's. `master_weights`: a float32 copy of weights that hardware.precision=bf16-true makes bfloat16.
    `states`: AdamW's two moments in full, in 8 bits (Dettmers et al. 2021; torchao's), or full in host memory, where
    the step is then computed: for weights that are not sharded.
    """

    name: str = "adamw"  # adamw, lamb or muon, or one that your program registered
    learning_rate: float = 6e-4  # at the schedule's peak
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # AdamW's
    epsilon: float = 1e-8  # added to the denominator of AdamW's step
    weight_decay: float = 0.1  # on matrices only
    gradient_clip: float = 1.0  # bound of the global gradient norm; 0 switches it off
    momentum: float = 0.95  # Muon's
    master_weights: bool = True
    states: str = option("full", OptimizerStates)
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        if self.states != "full" and self.name != "adamw":
            raise UserError(f"optimizer.states={self.states} needs optimizer=adamw, and this is {self.name}.")
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
    """conf/schedule: the learning rate's course. `warmup_steps` None means 5% of the steps, at least one."""

    name: str = "cosine"  # cosine, linear or constant, or one that your program registered
    warmup_steps: int | None = None  # null: 5% of the steps
    minimum_ratio: float = 0.1  # the last learning rate as a share of the peak; 0 comes a step after the last
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        at_least("schedule.warmup_steps", self.warmup_steps, 0)
        between("schedule.minimum_ratio", self.minimum_ratio, 0.0, 1.0)
        no_options("schedule", self.name, self.options, get_args(Schedule))


@dataclass
class TrainerSettings:
    """conf/trainer: how long, how much a step, on how many devices, and how often to log, validate and save.

    validation_micro_batch: samples at once in a language model's validation, which keeps nothing for a backward (None:
    micro_batch, for which compiled code is there already).
    checkpoint_format: of strategy=fsdp and context_parallel, "file" (one, gathered and written by the first device's
    process while training waits), "sharded" (a folder to which every process writes its part while training goes on;
    several machines need a disk that all of them see) or "auto" (sharded from a thousand million parameters on).
    max_minutes: after so long (from the command's start) the run writes its checkpoint and ends; resume=auto goes on.
    context_parallel_method, context_parallel_layout, timeout_seconds: of strategy=context_parallel, one sequence over
    several devices: how attention is shared (flashtrain/distributed/context/methods.py), who holds which tokens
    (layouts.py), and after how long without progress a stuck device ends the job (None: never), more than a step, an
    evaluation or a checkpoint takes.
    """

    steps: int = 500  # optimiser steps
    tokens_per_step: int = 65536  # over all devices
    micro_batch: int | None = None  # samples a device computes at once; null: from free memory
    validation_micro_batch: int | None = None
    devices: int = 1  # per node
    nodes: int = 1  # machines
    strategy: str = option("auto", Strategy)
    context_parallel_method: str = option("auto", ContextMethod)
    context_parallel_layout: str = option("balanced", ContextLayout)
    timeout_seconds: float | None = 1800.0
    compile: bool | None = None  # torch.compile; null: on GPUs only
    cuda_graphs: bool = False
    log_every: int = 10  # steps between two logged rows
    validate_every: int = 100  # steps between two validations
    checkpoint_every: int = 100  # steps between two checkpoints
    checkpoint_format: str = option("auto", CheckpointFormat)
    max_minutes: float | None = None
    callbacks: list[str] = field(default_factory=list)  # names registered with flashtrain.register("callback", ...)

    @property
    def ranks(self) -> int:
        """Processes over all nodes, one a device."""
        return self.devices * self.nodes

    def check(self) -> None:
        for name in ("steps", "tokens_per_step", "devices", "nodes", "log_every", "validate_every", "checkpoint_every"):
            at_least(f"trainer.{name}", getattr(self, name), 1)
        for name in ("micro_batch", "validation_micro_batch"):
            at_least(f"trainer.{name}", getattr(self, name), 1)
        above("trainer.max_minutes", self.max_minutes, 0)
        above("trainer.timeout_seconds", self.timeout_seconds, 0)
