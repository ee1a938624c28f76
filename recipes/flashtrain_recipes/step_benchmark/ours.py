"""flashtrain's step: the model, optimiser, clipping and compilation of `python -m flashtrain recipe=gpt2`."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from flashtrain.data.batch import Batch
from flashtrain.models.trainable import Trainable
from flashtrain.run.components import make_model
from flashtrain.run.run import make_task
from flashtrain.settings.settings import Settings
from flashtrain.tasks import LanguageModel
from flashtrain.training.gradients import clip_gradients
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.step_benchmark.case import StepCase
from flashtrain_recipes.step_benchmark.contenders import Contender, MemoryChoice, autocast_of
from flashtrain_recipes.step_benchmark.memory_choice import save_memory
from flashtrain_recipes.step_benchmark.training_step import TrainingStep

_NO_END = 1_000_000  # steps of the learning rate's schedule: more than are ever measured


class Ours(Contender):
    """What the settings train, of the case's size and context. attention: as the setting `attention`."""

    adapts = True

    def __init__(
        self, name: str, title: str, *, settings: Settings, hardware: Hardware, compiled: bool, attention: str
    ) -> None:
        self.name, self.title, self.attention, self.compiled = name, title, attention, compiled
        self.settings, self.hardware = settings, hardware

    def memory(self, case: StepCase, batch: int) -> MemoryChoice:
        with torch.device("meta"):
            return self._model(case, batch)[1]

    def build(self, case: StepCase, batch: int, device: torch.device) -> TrainingStep:
        with torch.device(device):
            model, _ = self._model(case, batch)
        if case.is_bfloat16:
            model.to(torch.bfloat16)
        settings, hardware = self._settings(case, batch), self._hardware(case)
        task = make_task(settings, hardware, model.train(), {})
        task.configure_model()
        found = task.configure_optimizers()
        return TrainingStep(
            model,
            partial(_loss, task),
            found["optimizer"],
            partial(clip_gradients, model, task.gradient_clip),
            autocast=autocast_of(case, device),
            schedule=found["lr_scheduler"]["scheduler"],
        )

    def _model(self, case: StepCase, batch: int) -> tuple[Trainable, MemoryChoice]:
        """The model with random weights on torch's current device, and its memory settings."""
        settings, hardware = self._settings(case, batch), self._hardware(case)
        model = make_model(settings, vocab_size=case.vocab_size, attention=hardware.attention)
        return model, save_memory(settings, hardware, model)

    def _settings(self, case: StepCase, batch: int) -> Settings:
        """The settings that train this case: a step is one micro-batch of `batch` sequences."""
        told = deepcopy(self.settings)
        told.context, told.data.document_mask = case.context, False
        told.model.size, told.model.vocab_rows = case.model, case.vocab_rows
        told.trainer.micro_batch, told.trainer.tokens_per_step = batch, batch * case.context
        told.trainer.steps, told.trainer.compile = _NO_END, self.compiled
        told.optimizer.master_weights = case.has_masters
        return told

    def _hardware(self, case: StepCase) -> Hardware:
        precision = precision_of(case, self.hardware.kind)
        # as machine.settle does: flash only where the machine has it
        attention = self.attention if self.attention != "flash" else self.hardware.attention
        return replace(self.hardware, precision=precision, attention=attention)


def precision_of(case: StepCase, kind: str) -> str:
    """Lightning's name of what a case's weights mean on a "cuda" or "cpu" device (contenders.autocast_of)."""
    if case.is_bfloat16:
        return "bf16-true"
    return "bf16-mixed" if kind == "cuda" else "32-true"


def _loss(task: LanguageModel, tokens: Tensor, labels: Tensor) -> Tensor:
    # without a document mask nothing else of a batch is read
    return task.batch_loss(cast(Batch, {"tokens": tokens, "labels": labels}))
