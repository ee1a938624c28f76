"""transformers' class and its own loss, with gradient checkpointing wherever
flashtrain recomputes any layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flashtrain.integrations import register_with_transformers
from flashtrain.integrations.huggingface_layers import decoder_layers
from flashtrain_recipes.huggingface_benchmark.baselines.base import HuggingFaceBaseline
from flashtrain_recipes.huggingface_benchmark.cases import HuggingFaceCase
from flashtrain_recipes.step_benchmark.baselines.hugging_face import hugging_face_loss
from flashtrain_recipes.step_benchmark.training_step import MemoryChoice, TrainingStep

CHECKPOINTING = "gradient checkpointing"


@dataclass(eq=False)
class Transformers(HuggingFaceBaseline):
    """transformers' training step as a baseline."""

    # transformers' name; None: flashtrain's, by register_with_transformers.
    attention: str | None = "sdpa"
    by_layer: bool = False  # compile each layer by itself, instead of the whole model

    def applies(self, case: HuggingFaceCase) -> bool:
        return case.documents == 1  # packed, its hybrids see other documents

    def memory(self, case: HuggingFaceCase) -> MemoryChoice:
        model = self.decoder(case)
        self.saved(case, model)
        return (
            MemoryChoice() if model.savings.checkpointing == "none" else MemoryChoice(CHECKPOINTING)
        )

    def build(self, case: HuggingFaceCase, device: torch.device) -> TrainingStep:
        ours = self.decoder(case)
        model: Any = ours.module
        model.set_attn_implementation(self.attention or register_with_transformers())
        step = self.step(case, ours, model, lambda _: partial(hugging_face_loss, model), device)
        if self.memory(case).words:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.compiled:
            for part in decoder_layers(model) if self.by_layer else [model]:
                part.compile(dynamic=False)
        return step
