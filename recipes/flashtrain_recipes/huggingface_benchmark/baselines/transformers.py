"""transformers' class and its own loss, with gradient checkpointing wherever
flashtrain recomputes any layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from flashtrain.integrations import register_with_transformers
from flashtrain.integrations.huggingface_layers import decoder_layers
from flashtrain_recipes.harness.rows import Row
from flashtrain_recipes.huggingface_benchmark.baselines.base import HuggingFaceBaseline
from flashtrain_recipes.huggingface_benchmark.cases import HuggingFaceCase
from flashtrain_recipes.step_benchmark.baselines.hugging_face import hugging_face_loss
from flashtrain_recipes.step_benchmark.training_step import (
    MemoryChoice,
    TrainingStep,
    usual_step,
)

CHECKPOINTING = "gradient checkpointing"


@dataclass(eq=False)
class Transformers(HuggingFaceBaseline):
    """transformers' training step as a baseline, with an optimizer of its own."""

    # transformers' name; None: flashtrain's, by register_with_transformers.
    attention: str | None = "sdpa"
    by_layer: bool = False  # compile each layer by itself, instead of the whole model
    # Whether its weights are float32 under autocast, as a Trainer's, whatever the case's are.
    autocast: bool = False

    def applies(self, case: HuggingFaceCase) -> bool:
        return case.documents == 1  # packed, its hybrids see other documents

    def columns(self, case: HuggingFaceCase | None) -> Row:
        return super().columns(case if case is None else self._own(case))

    def memory(self, case: HuggingFaceCase) -> MemoryChoice:
        model = self.decoder(case)
        self.saved(case, model)
        return (
            MemoryChoice() if model.savings.checkpointing == "none" else MemoryChoice(CHECKPOINTING)
        )

    def kernels(self, model: Any) -> Callable[[], AbstractContextManager[object]]:
        """Put other kernels into the model, and return what makes the context manager
        in which it computes with them."""
        return nullcontext

    def build(self, case: HuggingFaceCase, device: torch.device) -> TrainingStep:
        own = self._own(case)
        ours = self.decoder(own)
        model: Any = ours.module
        model.set_attn_implementation(self.attention or register_with_transformers())
        self.materialise(own, ours, device)
        options, loss = own.settings().optimizer, partial(hugging_face_loss, model)
        rates = {"learning_rate": options.learning_rate, "weight_decay": options.weight_decay}
        step = self.updating(usual_step(model, loss, own, device, **rates))
        step.within = self.kernels(model)
        if self.memory(case).words:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.compiled:
            for part in decoder_layers(model) if self.by_layer else [model]:
                part.compile(dynamic=False)
        return step

    def _own(self, case: HuggingFaceCase) -> HuggingFaceCase:
        return replace(case, weights="fp32") if self.autocast else case
