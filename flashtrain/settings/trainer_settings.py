"""Typed settings of how a run trains: optimiser, schedule, trainer. Part of flashtrain.settings.settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flashtrain.errors import UserError
from flashtrain.settings.setting_checks import at_least, between, one_of

STRATEGIES = ("auto", "ddp", "fsdp", "context")
# What flashtrain.distributed.context knows, by name: importing it takes seconds, and mistakes are told at once.
CONTEXT_WAYS = ("auto", "all-to-all", "all-gather", "ring", "hybrid")
CONTEXT_LAYOUTS = ("balanced", "head-tail", "contiguous")


@dataclass
class OptimizerSettings:
    """conf/optimizer. `gradient_clip` bounds the global L2 norm of the gradients; 0 leaves them as they are.

    `momentum` is muon's. `master_weights`: a float32 copy of weights that hardware.precision=bf16-true makes bfloat16.
    """

    name: str = "adamw"
    learning_rate: float = 6e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    gradient_clip: float = 1.0
    momentum: float = 0.95
    master_weights: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        if not self.learning_rate > 0:
            raise UserError(f"optimizer.learning_rate={self.learning_rate} must be above 0.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optimizer.betas={list(self.betas)} must be two numbers in [0, 1).")
        at_least("optimizer.epsilon", self.epsilon, 0)
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        at_least("optimizer.gradient_clip", self.gradient_clip, 0)
        between("optimizer.momentum", self.momentum, 0.0, 1.0, include_high=False)


@dataclass
class ScheduleSettings:
    """conf/schedule: the learning rate's course. `warmup_steps` None means 5% of the steps, at least one."""

    name: str = "cosine"
    warmup_steps: int | None = None
    minimum_ratio: float = 0.1
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        if self.warmup_steps is not None:
            at_least("schedule.warmup_steps", self.warmup_steps, 0)
        between("schedule.minimum_ratio", self.minimum_ratio, 0.0, 1.0)


@dataclass
class TrainerSettings:
    """conf/trainer: how long, how much a step, on how many devices, and how often to log, validate and save.

    validation_micro_batch: samples at once in a language model's validation, which keeps nothing for a backward (None:
    micro_batch, for which compiled code is there already).
    max_minutes: after so long (from the command's start) the run writes its checkpoint and ends; resume=auto goes on.
    context_way, context_layout, timeout_seconds: of strategy=context, one sequence over several devices: how attention
    is shared (flashtrain/distributed/context/ways.py), who holds which tokens (layout.py), and after how long without
    progress a stuck device ends the job (None: never), more than a step, an evaluation or a checkpoint takes.
    """

    steps: int = 500
    tokens_per_step: int = 65536
    micro_batch: int | None = None
    validation_micro_batch: int | None = None
    devices: int = 1
    nodes: int = 1
    strategy: str = "auto"
    context_way: str = "auto"
    context_layout: str = "balanced"
    timeout_seconds: float | None = 1800.0
    compile: bool | None = None
    cuda_graphs: bool = False
    log_every: int = 10
    validate_every: int = 100
    checkpoint_every: int = 100
    max_minutes: float | None = None
    callbacks: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        """Processes over all nodes, one a device."""
        return self.devices * self.nodes

    def check(self) -> None:
        for name in ("steps", "tokens_per_step", "devices", "nodes", "log_every", "validate_every", "checkpoint_every"):
            at_least(f"trainer.{name}", getattr(self, name), 1)
        for name in ("micro_batch", "validation_micro_batch"):
            if getattr(self, name) is not None:
                at_least(f"trainer.{name}", getattr(self, name), 1)
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise UserError(f"trainer.max_minutes={self.max_minutes} must be above 0.")
        one_of("trainer.strategy", self.strategy, STRATEGIES)
        one_of("trainer.context_way", self.context_way, CONTEXT_WAYS)
        one_of("trainer.context_layout", self.context_layout, CONTEXT_LAYOUTS)
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise UserError(f"trainer.timeout_seconds={self.timeout_seconds:g} must be above 0, or null for no limit.")
