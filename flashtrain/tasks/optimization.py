"""The optimizer and the learning-rate schedule that the settings groups
`optimizer` and `schedule` name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from flashtrain.data.datamodule import ResumableDataModule
from flashtrain.registry import component, register
from flashtrain.settings.settings import Settings
from flashtrain.settings.training import OptimizerSettings, ScheduleSettings, TrainerSettings
from flashtrain.training.lamb import lamb
from flashtrain.training.low_bit_adamw import adamw_8bit
from flashtrain.training.master_weights import MasterWeights
from flashtrain.training.one_pass_adamw import HALF
from flashtrain.training.optimizers import adamw, muon
from flashtrain.training.schedules import SCHEDULES


def _common(settings: OptimizerSettings) -> dict[str, Any]:
    """Return the arguments that every optimizer takes, from the settings."""
    return {
        "lr": settings.learning_rate,
        "betas": (settings.betas[0], settings.betas[1]),
        "eps": settings.epsilon,
        "weight_decay": settings.weight_decay,
    }


@register("optimizer", "adamw")
def _adamw(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    return (adamw_8bit if settings.states == "8bit" else adamw)(model, **_common(settings))


@register("optimizer", "lamb")
def _lamb(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    return lamb(model, **_common(settings))


@register("optimizer", "muon")
def _muon(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    return muon(model, **_common(settings), momentum=settings.momentum)


def _scheduled(
    name: str, optimizer: torch.optim.Optimizer, settings: ScheduleSettings, total_steps: int
) -> LRScheduler:
    given = 0.05 if settings.warmup_steps is None else settings.warmup_steps
    warmup = max(1, round(given * total_steps)) if 0 < given < 1 else int(given)
    return SCHEDULES[name](optimizer, min(warmup, total_steps), total_steps, settings.minimum_ratio)


for _name in SCHEDULES:
    register("schedule", _name)(partial(_scheduled, _name))


def optimizer_builder(
    settings: OptimizerSettings, *, sharded: bool
) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a function that makes a model's optimizer: the `make_optimizer` of TrainingTask.

    Args:
        settings: the group `optimizer`.
        sharded: whether the weights are sharded over devices (Settings.shards_weights).
    """
    build = component("optimizer", settings.name)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        inner = build(model, settings=settings)
        # FSDP2 shards the weights, whose copies its checkpoints would not know.
        masters = settings.master_weights and not sharded
        half = any(
            parameter.dtype in HALF for parameter in model.parameters() if parameter.requires_grad
        )
        if settings.states == "host":
            return MasterWeights(inner, host=True)
        return MasterWeights(inner) if masters and half else inner

    return optimizer


def optimization_options(settings: Settings) -> dict[str, Any]:
    """Return the arguments of TrainingTask that the groups `optimizer` and `schedule` decide."""
    schedule, steps = component("schedule", settings.schedule.name), settings.trainer.steps
    return {
        "make_optimizer": optimizer_builder(settings.optimizer, sharded=settings.shards_weights),
        "make_schedule": partial(schedule, settings=settings.schedule, total_steps=steps),
        "gradient_clip": settings.optimizer.gradient_clip,
    }


def set_steps(
    settings: TrainerSettings, data: ResumableDataModule, samples: int, advice: str
) -> list[str]:
    """If trainer.epochs is given, set trainer.steps to its number of steps; return a list with the
    line that says so, or [].

    Args:
        data: the data module, after its setup().
        samples: samples of a step over all devices; if a row holds several samples, rows of a step.
        advice: what to set where whole steps read over a tenth more.
    """
    if settings.epochs is None:
        return []
    steps, read = data.steps_of(settings.epochs, samples)
    settings.steps = data.total_steps = steps
    line = f"trainer.epochs={settings.epochs:g}: {steps:,} step{'s' * (steps > 1)}, counted from"
    more = f". Steps are whole, so that it is read {read:.1f} times. {advice}"
    return [f"{line} the training data{more * (read > 1.1 * settings.epochs)}"]
