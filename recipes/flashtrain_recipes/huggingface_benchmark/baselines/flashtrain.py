"""The training step of recipe=hf: loss in chunks, flashtrain's attention, `memory.*`,
layers compiled one by one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from flashtrain.errors import UserError
from flashtrain.settings.settings import Settings
from flashtrain.tasks.language.prepare import language_model
from flashtrain.training.float8 import RATE, check_float8, float8_flops
from flashtrain_recipes.huggingface_benchmark.baselines.base import HuggingFaceBaseline
from flashtrain_recipes.huggingface_benchmark.cases import HuggingFaceCase
from flashtrain_recipes.step_benchmark.baselines.flashtrain import batch_loss
from flashtrain_recipes.step_benchmark.training_step import MemoryChoice, TrainingStep, task_step


@dataclass(eq=False)
class Flashtrain(HuggingFaceBaseline):
    """flashtrain's training step as a baseline."""

    float8: str | None = None  # as model.float8
    adapts = True

    def missing(self, device: torch.device) -> str | None:
        try:
            check_float8(self.float8, self.hardware, plans=False)
        except UserError as problem:
            return str(problem)
        return super().missing(device)

    def settings(self, case: HuggingFaceCase) -> Settings:
        own = case.settings()
        own.model.float8 = self.float8
        return own

    def peak(self, case: HuggingFaceCase, peak_flops: float | None) -> float | None:
        if peak_flops is None or self.float8 is None:
            return peak_flops
        whole, rounded = case.flops_per_token(), float8_flops(self.decoder(case), self.float8)[0]
        return peak_flops * whole / (whole - rounded * (1 - 1 / RATE))

    def memory(self, case: HuggingFaceCase) -> MemoryChoice:
        return self.saved(case, self.decoder(case))

    def build(self, case: HuggingFaceCase, device: torch.device) -> TrainingStep:
        model = self.decoder(case)
        if self.float8 is not None:
            from flashtrain.training.float8_linear import convert_linears

            convert_linears(model, self.float8)
        self.saved(case, model)
        self.materialise(case, model, device)
        settings = self.settings(case)
        settings.trainer.compile = self.compiled
        task = language_model(settings, case.hardware_of(self.hardware), model, {})
        return self.updating(task_step(task, model, partial(batch_loss, task), case, device))
