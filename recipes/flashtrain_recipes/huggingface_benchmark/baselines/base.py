"""The base class of all implementations of a decoder's training step: it builds flashtrain's model
of the case, and an optimizer.

The model wraps transformers' class, and equal seeds give equal weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.huggingface_benchmark.cases import HuggingFaceCase
from flashtrain_recipes.step_benchmark.baselines.flashtrain import save_memory
from flashtrain_recipes.step_benchmark.training_step import (
    MemoryChoice,
    StepBaseline,
    TrainingStep,
)


class GradientsOnly(torch.optim.SGD):
    """An optimizer that can free gradients but updates nothing, to measure
    forward and backward alone."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None


@dataclass(eq=False)
class HuggingFaceBaseline(StepBaseline):
    """An implementation of a decoder's training step."""

    name: str
    title: str
    hardware: Hardware
    updates: bool  # whether steps update the weights; False measures forward and backward alone
    compiled: bool = False

    def settings(self, case: HuggingFaceCase) -> Settings:
        """Return the settings of recipe=hf that train the case."""
        return case.settings()

    def decoder(self, case: HuggingFaceCase) -> HuggingFaceDecoder:
        """Return flashtrain's model of the case, on the meta device (without weights)."""
        return case.decoder(case.hardware_of(self.hardware))

    def saved(self, case: HuggingFaceCase, model: HuggingFaceDecoder) -> MemoryChoice:
        """Apply the settings `memory.*` of the case to flashtrain's model, and
        return what was chosen."""
        return save_memory(self.settings(case), case.hardware_of(self.hardware), model)

    def materialise(
        self, case: HuggingFaceCase, model: HuggingFaceDecoder, device: torch.device
    ) -> None:
        """Draw the random weights of flashtrain's model on the device."""
        torch.manual_seed(case.settings().seed)
        model.materialise(device)
        model.train()

    def updating(self, step: TrainingStep) -> TrainingStep:
        """Return the step, without clipping and update where `updates` is False."""
        if self.updates:
            return step
        trained = [one for one in step.model.parameters() if one.requires_grad]
        return step.without_update(GradientsOnly(trained, lr=0.0))
