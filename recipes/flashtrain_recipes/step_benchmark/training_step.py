"""A training step of any model: free the gradients, forward, backward, clip, update."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flashtrain.training.gradient_clipping import clip_gradients
from flashtrain_recipes.harness.baseline import Baseline
from flashtrain_recipes.step_benchmark.cases import StepCase
from flashtrain_recipes.step_benchmark.master_copies import MasterCopies

# GPT-2's usual optimizer, for every baseline but ours, whose own settings have the same values.
LEARNING_RATE, BETAS, WEIGHT_DECAY, MAX_NORM = 6e-4, (0.9, 0.95), 0.1, 1.0

LossFunction = Callable[..., Tensor]


class TrainingStep:
    """A model on a device with its optimizer. Calling it with the loss's arguments
    makes one training step.

    Args:
        loss: returns the loss, a scalar, of the arguments of a step.
        clip: clips the gradients, before the update.
        autocast: the dtype that matrix products are computed in; None: the weights' dtype.
        schedule: the learning rate's schedule, stepped after the update.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        optimizer: torch.optim.Optimizer,
        clip: Callable[[], object],
        *,
        autocast: torch.dtype | None = None,
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._loss, self._clip, self._schedule, self._autocast = loss, clip, schedule, autocast
        self._device_type = next(model.parameters()).device.type
        # Makes the context manager in which forward and backward run.
        self.within: Callable[[], AbstractContextManager[object]] = nullcontext

    def __call__(self, *arguments: Any) -> Tensor:
        """Make a step, and return the loss before the update, a scalar on the device; the device
        is not waited for."""
        self.drop_gradients()
        # as Lightning's precision plugin calls it: weights are cast at each use, or
        # by the compiled graph
        with self.within():
            with torch.autocast(
                self._device_type,
                self._autocast,
                enabled=self._autocast is not None,
                cache_enabled=False,
            ):
                loss = self._loss(*arguments)
            loss.backward()
        self._clip()
        self.optimizer.step()
        if self._schedule is not None:
            self._schedule.step()
        return loss.detach()

    def without_update(self, optimizer: torch.optim.Optimizer) -> TrainingStep:
        """Return the step, now without clipping and schedule, and with this optimizer."""
        self.optimizer, self._clip, self._schedule = optimizer, lambda: None, None
        return self

    def drop_gradients(self) -> None:
        """Free the gradients' memory."""
        self.optimizer.zero_grad(set_to_none=True)


class MemoryChoice(NamedTuple):
    """How a training step saves memory, in words, and its estimated peak memory in GiB."""

    # What is recomputed, offloaded or cut into chunks, as rows show it; "": nothing.
    words: str = ""
    estimate_gib: float | None = None  # the estimated peak; None: unknown


class StepBaseline(Baseline):
    """Base class of baselines whose training steps are timed: a subclass builds the
    model and its batches."""

    # To a case, by trading time for memory: what did not fit says nothing of a larger case.
    adapts = False

    def memory(self, case: Any) -> MemoryChoice:
        """Return how the baseline saves memory at the case; by default not at all."""
        return MemoryChoice()

    def peak(self, case: Any, peak_flops: float | None) -> float | None:
        """Return the peak for MFU in FLOP/s, where the device's is `peak_flops`; by default it."""
        return peak_flops

    @abstractmethod
    def build(self, case: Any, device: torch.device) -> TrainingStep:
        """Return the training step of a model with random weights on the device."""

    def batches(
        self, case: Any, drawn: tuple[Any, ...], device: torch.device
    ) -> Sequence[tuple[Any, ...]]:
        """Return the arguments of each step in a launch, made from what the
        case drew. Not timed."""
        return [drawn]


def usual_step(
    model: nn.Module,
    loss: LossFunction,
    case: StepCase,
    device: torch.device,
    *,
    learning_rate: float = LEARNING_RATE,
    weight_decay: float = WEIGHT_DECAY,
) -> TrainingStep:
    """Return the training step of other libraries' models: with fused AdamW, weight decay on
    matrices, and gradients clipped by their norm.

    The weights become bfloat16, or the loss runs under autocast, as the case says (on a CPU
    float32 stays float32).
    """
    if case.is_bfloat16:
        model.to(torch.bfloat16)
    parameters = [one for one in model.parameters() if one.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = (
        MasterCopies(groups, lr=learning_rate, betas=BETAS)
        if case.has_masters
        else torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, fused=True)
    )
    clip = partial(nn.utils.clip_grad_norm_, parameters, MAX_NORM)
    return TrainingStep(model, loss, optimizer, clip, autocast=autocast_of(case, device))


def task_step(
    task: Any, model: nn.Module, loss: LossFunction, case: StepCase, device: torch.device
) -> TrainingStep:
    """Return the training step of `model` with the optimizer, clipping and schedule of
    `task`, its LightningModule."""
    if case.is_bfloat16:
        model.to(torch.bfloat16)
    task.configure_model()
    found = task.configure_optimizers()
    clip = partial(clip_gradients, model, task.gradient_clip, optimizer=found["optimizer"])
    schedule = found["lr_scheduler"]["scheduler"]
    return TrainingStep(
        model, loss, found["optimizer"], clip, autocast=autocast_of(case, device), schedule=schedule
    )


def autocast_of(case: StepCase, device: torch.device) -> torch.dtype | None:
    """Return the autocast dtype of a case: bfloat16 on a GPU unless the weights are
    bfloat16 already, else None."""
    return torch.bfloat16 if device.type == "cuda" and not case.is_bfloat16 else None
