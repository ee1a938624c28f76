"""One optimiser step of any model (zero the gradients, forward, backward, clip, update), and what an implementation is
that has such steps; GPT-2 as a case of it, of one size at one context, with random tokens.

B batch, S sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.models.gpt2 import GPT2, GPT2Config
from flashtrain.settings.settings import Settings
from flashtrain.tasks.components import vocabulary_of
from flashtrain.training.optimizers import MasterWeights
from flashtrain.training.steps import clip_gradients

MASTERS = "bf16-master"


class WeightsHeld:
    """Of a case: weights: "fp32" (autocast), "bf16" (and nothing in float32) or "bf16-master" (with float32 copies that
    the optimiser updates)."""

    weights: str

    @property
    def is_bfloat16(self) -> bool:
        """Whether the weights that multiply are held in bfloat16."""
        return self.weights != "fp32"

    @property
    def has_masters(self) -> bool:
        """Whether the optimiser keeps float32 copies of them."""
        return self.weights == MASTERS


@dataclass(frozen=True)
class StepCase(WeightsHeld):
    """model: a name of models.gpt2.SIZES. context: S.

    vocab_size: tokens; vocab_rows: rows of every implementation's embedding table, None for vocab_size rounded up to
    a multiple of 64.
    """

    model: str
    context: int
    weights: str
    vocab_size: int
    vocab_rows: int | None = None

    def __str__(self) -> str:
        return f"{self.model} S={self.context} weights {self.weights}"

    def config(self) -> GPT2Config:
        """The shape that every implementation builds."""
        return GPT2Config.of_size(
            self.model, vocab_size=self.vocab_size, context=self.context, vocab_rows=self.vocab_rows
        )

    def draw(self, batch: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
        """Random tokens and labels, each (B, S) int64, labels[b, s] the token after tokens[b, s]; equal for equal
        seeds."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(self.vocab_size, (batch, self.context + 1), generator=generator).to(device)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    def flops_per_token(self) -> float:
        """Model FLOPs of one token's forward and backward: 6 N + 12 layers E S / 2 (GPT2.flops_per_token).

        The same for every implementation, whatever it computes twice or in vain.
        """
        return _flops_per_token(self.config())


@cache
def _flops_per_token(config: GPT2Config) -> float:
    with torch.device("meta"):
        return GPT2(config, attention="sdpa").flops_per_token(config.context)


def cases(settings: Settings) -> list[StepCase]:
    """Every model, context and precision of weights asked for. Raises UserError for a model that is not GPT-2."""
    if settings.model.name != "gpt2":
        raise UserError(
            f"model={settings.model.name}: training steps of model=gpt2 are measured, which others have too."
        )
    asked = settings.benchmark
    vocab_size = vocabulary_of(settings.data)
    return [
        StepCase(model, context, weights, vocab_size, settings.model.vocab_rows)
        for model in asked.models
        for weights in asked.weights
        for context in asked.contexts
    ]


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
    shares: whether its weights and optimiser states are the other implementations' too, and all that is on the device.
    """

    name: str
    title: str
    compiled: bool
    adapts = False
    shares = False

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
