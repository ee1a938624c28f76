"""The implementations whose training steps are measured, each behind the same few calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtrain.training.master_weights import MasterWeights
from flashtrain_recipes.step_benchmark.case import StepCase
from flashtrain_recipes.step_benchmark.plain_gpt import PlainGPT
from flashtrain_recipes.step_benchmark.training_step import LossFunction, TrainingStep

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


class Plain(Contender):
    """PlainGPT, compiled where that is wanted. attention: see PlainGPT; backend: the only one that SDPA may take."""

    def __init__(
        self, name: str, title: str, *, compiled: bool, attention: str = "sdpa", backend: SDPBackend | None = None
    ) -> None:
        self.name, self.title = name, title
        self.compiled, self.attention, self.backend = compiled, attention, backend

    def missing(self, device: torch.device) -> str | None:
        return "needs an NVIDIA GPU" if self.backend is not None and device.type != "cuda" else None

    def build(self, case: StepCase, batch: int, device: torch.device) -> TrainingStep:
        shape = case.config()
        with torch.device(device):
            model = PlainGPT(
                layers=shape.layers,
                heads=shape.heads,
                embed=shape.embed,
                context=shape.context,
                vocab_rows=shape.vocab_rows,
                attention=self.attention,
            )
        compiled = torch.compile(model.loss, dynamic=False, fullgraph=True) if self.compiled else model.loss
        within = nullcontext if self.backend is None else partial(sdpa_kernel, self.backend)
        return usual_step(model, compiled, case, device, within=within)


def usual_step(
    model: nn.Module, loss: LossFunction, case: StepCase, device: torch.device, **options: Any
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


def autocast_of(case: StepCase, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast for this case: bfloat16 on a GPU unless the weights are that already."""
    return torch.bfloat16 if device.type == "cuda" and not case.is_bfloat16 else None


def choose_contenders(everything: Iterable[Contender], names: Sequence[str] | None) -> list[Contender]:
    """Those with these names, in their own order; names None: all."""
    return [contender for contender in everything if names is None or contender.name in names]
