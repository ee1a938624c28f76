"""flashtrain's GPT-2, trained as recipe=gpt2 trains it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from flashtrain.data.packing import Batch
from flashtrain.models.trainable import Trainable
from flashtrain.settings.settings import Settings
from flashtrain.tasks import LanguageModel
from flashtrain.tasks.batching import choose_batching
from flashtrain.tasks.decoders import make_model
from flashtrain.tasks.language.prepare import language_model
from flashtrain.training.hardware import Hardware
from flashtrain.training.memory import GIB
from flashtrain_recipes.step_benchmark.cases import GPT2Case
from flashtrain_recipes.step_benchmark.training_step import (
    MemoryChoice,
    StepBaseline,
    TrainingStep,
    task_step,
)

FLASHTRAIN = "flashtrain"


@dataclass(eq=False)
class Flashtrain(StepBaseline):
    """flashtrain's GPT-2 as a baseline, at the case's size and context."""

    name: str
    title: str
    settings: Settings  # of the run; each case changes its size, context, batch and precision
    hardware: Hardware
    attention: str  # a value of the setting `attention`
    compiled: bool = False
    adapts = True

    def memory(self, case: GPT2Case) -> MemoryChoice:
        with torch.device("meta"):
            return self._model(case)[1]

    def build(self, case: GPT2Case, device: torch.device) -> TrainingStep:
        with torch.device(device):
            model, _ = self._model(case)
        task = language_model(self._settings(case), self._hardware(case), model.train(), {})
        return task_step(task, model, partial(batch_loss, task), case, device)

    def _model(self, case: GPT2Case) -> tuple[Trainable, MemoryChoice]:
        settings, hardware = self._settings(case), self._hardware(case)
        model = make_model(
            settings.model,
            vocab_size=case.vocab_size,
            context=settings.context,
            attention=hardware.attention,
        )
        return model, save_memory(settings, hardware, model)

    def _settings(self, case: GPT2Case) -> Settings:
        own = case.settings_of(self.settings)
        own.model.size = case.model
        own.model.vocab_rows = case.vocab_rows
        own.trainer.compile = self.compiled
        return own

    def _hardware(self, case: GPT2Case) -> Hardware:
        # as adapt_to_machine does: flash only where the machine has it
        attention = self.attention if self.attention != "flash" else self.hardware.attention
        return replace(case.hardware_of(self.hardware), attention=attention)


def save_memory(settings: Settings, hardware: Hardware, model: Trainable) -> MemoryChoice:
    """Apply the settings `memory.*` (activation checkpointing and offloading) to the model, and
    return what was chosen.

    Args:
        settings, hardware: of one case.
        model: not compiled yet; on the meta device where only the choice is needed.
    """
    if model.shape is None:
        return MemoryChoice()
    batching = choose_batching(settings, hardware, model)
    model.save_memory(batching.savings)
    estimate = None if batching.estimate is None else round(batching.estimate.total / GIB, 2)
    return MemoryChoice(batching.savings.describe(), estimate)


def batch_loss(task: LanguageModel, *batch: Tensor) -> Tensor:
    """Return the task's loss for tokens, labels and, of packed rows, positions and documents."""
    names = ("tokens", "labels", "positions", "documents")
    return task.batch_loss(cast(Batch, dict(zip(names, batch, strict=False))))
