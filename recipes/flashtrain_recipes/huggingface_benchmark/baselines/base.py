"""The base class of all implementations of a decoder's training step: it builds flashtrain's model
of the case, and an optimizer.

The model wraps transformers' class, and equal seeds give equal weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
from flashtrain.tasks import LanguageModel
from flashtrain.tasks.decoders import make_model
from flashtrain.tasks.language.prepare import language_model
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.huggingface_benchmark.cases import HuggingFaceCase
from flashtrain_recipes.step_benchmark.baselines.flashtrain import save_memory
from flashtrain_recipes.step_benchmark.training_step import (
    MemoryChoice,
    StepBaseline,
    TrainingStep,
    autocast_of,
    task_step,
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

    def decoder(self, case: HuggingFaceCase) -> HuggingFaceDecoder:
        """Return flashtrain's model of the case, on the meta device (without weights)."""
        settings, hardware = case.settings(), case.hardware_of(self.hardware)
        model = make_model(
            settings.model, vocab_size=0, context=settings.context, attention=hardware.attention
        )
        model.keep_in(hardware.precision)
        return cast(HuggingFaceDecoder, model)

    def saved(self, case: HuggingFaceCase, model: HuggingFaceDecoder) -> MemoryChoice:
        """Apply the settings `memory.*` of the case to flashtrain's model, and
        return what was chosen."""
        return save_memory(case.settings(), case.hardware_of(self.hardware), model)

    def step(
        self,
        case: HuggingFaceCase,
        model: HuggingFaceDecoder,
        part: nn.Module,
        loss_of: Callable[[LanguageModel], Callable[..., Tensor]],
        device: torch.device,
    ) -> TrainingStep:
        """Draw the model's random weights on the device, and return the training step.

        Args:
            case: the shape, context, batch and precision to train.
            model: flashtrain's model, from `decoder`.
            part: the module to train: the model, or transformers' module inside it.
            loss_of: returns the loss function, given flashtrain's task.
        """
        settings = case.settings()
        settings.trainer.compile = self.compiled and part is model
        torch.manual_seed(settings.seed)
        model.materialise(device)
        model.train()
        task = language_model(settings, case.hardware_of(self.hardware), model, {})
        step = task_step(task, part, loss_of(task), case, device)
        if self.updates:
            return step
        trained = [one for one in part.parameters() if one.requires_grad]
        optimizer = GradientsOnly(trained, lr=0.0)
        return TrainingStep(
            part, loss_of(task), optimizer, lambda: None, autocast=autocast_of(case, device)
        )
