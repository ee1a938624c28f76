"""One optimiser step of any model (zero the gradients, forward, backward, clip, update), and what an implementation is
that has such steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flashtrain.training.optimizers import MasterWeights
from flashtrain.training.steps import clip_gradients
from flashtrain_recipes.step_benchmark.cases import WeightsHeld

LossFunction = Callable[..., Tensor]
Batches = Callable[[Tensor, Tensor], Sequence[tuple[Any, ...]]]


class TrainingStep:
    """A model on a device, with its optimiser. Called with tokens and labels (B, S), it makes a step.

    loss: of (tokens, labels), a scalar. batches: of the tokens and labels that it is called with, what the loss takes
    in each of several steps, one after the other, where a call is to make more than one (None: one). clip: bounds the
    gradients before the update. autocast: the dtype that matrix products are computed in, None for the weights' own.
    within: entered around the step. schedule: stepped after it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        optimizer: torch.optim.Optimizer,
        clip: Callable[[], object],
        *,
        autocast: torch.dtype | None = None,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
        batches: Batches | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._loss, self._clip, self._within, self._schedule = loss, clip, within, schedule
        self._autocast, self._batches = autocast, batches
        self._device_type = next(model.parameters()).device.type

    def __call__(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The loss before the (last) update, a scalar on the device that nothing has waited for."""
        each = [(tokens, labels)] if self._batches is None else self._batches(tokens, labels)
        return [self._step(*arguments) for arguments in each][-1]

    def _step(self, *arguments: Any) -> Tensor:
        with self._within():
            self.drop_gradients()
            # as Lightning's precision plugin calls it: weights are cast at each use, or by the compiled graph
            with torch.autocast(
                self._device_type, self._autocast, enabled=self._autocast is not None, cache_enabled=False
            ):
                loss = self._loss(*arguments)
            loss.backward()
            self._clip()
            self.optimizer.step()
            if self._schedule is not None:
                self._schedule.step()
        return loss.detach()

    def drop_gradients(self) -> None:
        """Give the gradients' memory back."""
        self.optimizer.zero_grad(set_to_none=True)

    def move(self, device: torch.device) -> None:
        """Take weights and optimiser states to a device, each parameter staying the object it is."""
        self.drop_gradients()
        updated = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for tensor in {id(one): one for one in (*self.model.parameters(), *self.model.buffers(), *updated)}.values():
            tensor.data = tensor.data.to(device)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device)


# GPT-2's usual optimiser, for every implementation but ours, whose own settings have the same values.
LEARNING_RATE, BETAS, WEIGHT_DECAY, LARGEST_NORM = 6e-4, (0.9, 0.95), 0.1, 1.0


class MemoryChoice(NamedTuple):
    """words: what is computed twice, moved or cut into pieces to need less memory; "" for nothing of it.

    estimate_gib: the peak that is expected, in GiB; None where nobody says.
    """

    words: str = ""
    estimate_gib: float | None = None


class Contender(ABC):
    """One implementation. name: in settings; title: in tables. compiled: by torch.compile.

    adapts: whether it trades time for memory where a case needs that: what did not fit says nothing of what is larger.
    """

    name: str
    title: str
    compiled: bool
    adapts = False

    def missing(self, device: torch.device) -> str | None:
        """Why the implementation cannot be had on this device; None where it can."""
        return None

    def memory(self, case: Any, batch: int) -> MemoryChoice:
        """The memory settings that the case (a StepCase, or what this contender measures) is trained with."""
        return MemoryChoice()

    @abstractmethod
    def build(self, case: Any, batch: int, device: torch.device) -> TrainingStep:
        """A model with random weights on the device, and its step, for every batch of the same memory settings."""


def usual_step(
    model: nn.Module, loss: LossFunction, case: WeightsHeld, device: torch.device, **options: Any
) -> TrainingStep:
    """The step of an implementation that is not ours: torch's fused AdamW, decay on matrices, clipping by the norm.

    Weights go to bfloat16, or the loss under autocast, as the case says (on a CPU float32 stays float32).
    """
    if case.is_bfloat16:
        model.to(torch.bfloat16)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)
    if case.has_masters:
        optimizer = MasterWeights(optimizer)
    clip = partial(nn.utils.clip_grad_norm_, parameters, LARGEST_NORM)
    return TrainingStep(model, loss, optimizer, clip, autocast=autocast_of(case, device), **options)


def task_step(
    task: Any, model: nn.Module, loss: LossFunction, case: WeightsHeld, device: torch.device, **options: Any
) -> TrainingStep:
    """The step that a task of ours (a LightningModule) trains its model with."""
    task.configure_model()
    found = task.configure_optimizers()
    return TrainingStep(
        model,
        loss,
        found["optimizer"],
        partial(clip_gradients, model, task.gradient_clip),
        autocast=autocast_of(case, device),
        schedule=found["lr_scheduler"]["scheduler"],
        **options,
    )


def autocast_of(case: WeightsHeld, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast for this case: bfloat16 on a GPU unless the weights are that already."""
    return torch.bfloat16 if device.type == "cuda" and not case.is_bfloat16 else None
