"""The training step of recipe=hf: loss in chunks, flashtrain's attention, `memory.*`,
layers compiled one by one."""

from __future__ import annotations

from functools import partial

import torch

from flashtrain.tasks.language.prepare import language_model
from flashtrain_recipes.huggingface_benchmark.baselines.base import HuggingFaceBaseline
from flashtrain_recipes.huggingface_benchmark.cases import HuggingFaceCase
from flashtrain_recipes.step_benchmark.baselines.flashtrain import batch_loss
from flashtrain_recipes.step_benchmark.training_step import MemoryChoice, TrainingStep, task_step


class Flashtrain(HuggingFaceBaseline):
    """flashtrain's training step as a baseline."""

    adapts = True

    def memory(self, case: HuggingFaceCase) -> MemoryChoice:
        return self.saved(case, self.decoder(case))

    def build(self, case: HuggingFaceCase, device: torch.device) -> TrainingStep:
        model = self.decoder(case)
        self.saved(case, model)
        self.materialise(case, model, device)
        settings = case.settings()
        settings.trainer.compile = self.compiled
        task = language_model(settings, case.hardware_of(self.hardware), model, {})
        return self.updating(task_step(task, model, partial(batch_loss, task), case, device))
