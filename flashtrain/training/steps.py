"""Parts of an optimiser step: its end, gradient clipping, and the learning rate's schedule.

Schedules are torch's LambdaLR, for Lightning's interval "step"; the optimiser's learning rate is the peak.
(transformers' schedules begin with a step at rate 0, and its linear one has no minimum.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class OptimizerStepCounter:
    """Detects whether a training batch ended an optimiser step.

    Lightning calls `on_train_batch_end` for every micro-batch; with accumulate_grad_batches=4 only every fourth (and
    the last of an epoch) ends a step. Exactly then the trainer's global_step advances.
    """

    def __init__(self) -> None:
        self.seen = 0

    def start(self, trainer: pl.Trainer) -> None:
        """Call in on_train_start: a resumed run begins at its restored step."""
        self.seen = trainer.global_step

    def ended(self, trainer: pl.Trainer) -> bool:
        """True once after each optimiser step. Call once in each on_train_batch_end."""
        advanced = trainer.global_step != self.seen
        self.seen = trainer.global_step
        return advanced


def log_interval(trainer: pl.Trainer) -> int:
    """Optimiser steps between two readings: Trainer(log_every_n_steps=...), or 50 if logging is off (0)."""
    return getattr(trainer, "log_every_n_steps", 0) or 50


@torch.no_grad()
def clip_gradients(
    module: nn.Module | Iterable[torch.Tensor],
    max_norm: float | None,
    scale: float | torch.Tensor = 1.0,
) -> torch.Tensor:
    """Scale the gradients in place so that their Euclidean norm over all parameters is at most max_norm.

    Pascanu et al. 2013, arXiv 1211.5063. A NaN or infinite norm makes the gradients NaN, so that it shows.

    Args:
        module: a module or its parameters. If FSDP2 shards them (DTensor), the norm is over all shards, and every rank
            must call this.
        max_norm: None, 0 or infinity: only measure.
        scale: the current factor of the gradients (fp16 loss scaling), which stays in them.

    Returns:
        The norm before clipping, without `scale`: a float32 scalar on the gradients' device, not read by the host.
    """
    parameters = list(module.parameters() if isinstance(module, nn.Module) else module)
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    if not parameters:
        return torch.zeros(())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, norm_type=2.0)
    full_tensor = getattr(norm, "full_tensor", None)
    if full_tensor is not None:  # a DTensor: sums over the shards
        norm = full_tensor()
    norm = norm.float() / scale
    if max_norm and max_norm != float("inf"):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def gradient_scale(trainer: pl.Trainer, optimizer: Any) -> float | torch.Tensor:
    """The factor that gradients still carry when Lightning asks for clipping.

    1 except under fp16 loss scaling ("16-mixed") with a fused optimiser, which undoes the scaling itself inside its
    step; Lightning undoes it before clipping for every other optimiser.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    inner = getattr(optimizer, "optimizer", optimizer)
    if scaler is None or not getattr(inner, "_step_supports_amp_scaling", False):
        return 1.0
    # The device-side value; get_scale() would wait for the device.
    scale = getattr(scaler, "_scale", None)
    return scale if scale is not None else scaler.get_scale()


def cosine_with_warmup(
    optimizer: Optimizer, warmup_steps: int, total_steps: int, minimum_ratio: float = 0.1
) -> LambdaLR:
    """Linear warm-up to the peak over warmup_steps, then half a cosine down to minimum_ratio times the peak.

    The first step already has 1/warmup_steps of the peak, and the last of total_steps the minimum (Loshchilov and
    Hutter 2017, arXiv 1608.03983, without restarts); a minimum of 0 comes a step later, so that every step learns.
    Steps past total_steps stay at the minimum.
    """

    def ratio(step: int) -> float:
        done = _fraction_done(step, warmup_steps, total_steps, minimum_ratio)
        return minimum_ratio + (1 - minimum_ratio) * 0.5 * (1 + math.cos(math.pi * done))

    return _after_warmup(optimizer, warmup_steps, ratio)


def linear_with_warmup(
    optimizer: Optimizer, warmup_steps: int, total_steps: int, minimum_ratio: float = 0.0
) -> LambdaLR:
    """Linear warm-up to the peak over warmup_steps, then a straight line down to minimum_ratio times the peak.

    First and last steps as in `cosine_with_warmup`.
    """

    def ratio(step: int) -> float:
        return 1 - (1 - minimum_ratio) * _fraction_done(step, warmup_steps, total_steps, minimum_ratio)

    return _after_warmup(optimizer, warmup_steps, ratio)


def constant_with_warmup(
    optimizer: Optimizer, warmup_steps: int, total_steps: int | None = None, minimum_ratio: float = 1.0
) -> LambdaLR:
    """Linear warm-up to the peak over warmup_steps, then the peak for ever.

    total_steps and minimum_ratio are taken so that all schedules are called alike; they change nothing.
    """
    return _after_warmup(optimizer, warmup_steps, lambda step: 1.0)


SCHEDULES: dict[str, Callable[..., LambdaLR]] = {
    "cosine": cosine_with_warmup,
    "linear": linear_with_warmup,
    "constant": constant_with_warmup,
}


def _fraction_done(step: int, warmup_steps: int, total_steps: int, minimum_ratio: float) -> float:
    """0 at the step that reaches the peak, 1 at the last step and after; only after it where that is a rate of 0."""
    first = max(warmup_steps - 1, 0)
    last = total_steps - 1 if minimum_ratio else total_steps
    return min(1.0, (step - first) / max(1, last - first))


def _after_warmup(optimizer: Optimizer, warmup_steps: int, ratio: Callable[[int], float]) -> LambdaLR:
    def factor(step: int) -> float:
        return (step + 1) / warmup_steps if step < warmup_steps else ratio(step)

    return LambdaLR(optimizer, factor)
