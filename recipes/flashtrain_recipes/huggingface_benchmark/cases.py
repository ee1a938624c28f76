"""The cases of recipe=hf-speed and hf-long: decoders of published models' shapes, with random weights.

B batch, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flashtrain.models.trainable import Trainable
from flashtrain.settings.settings import Settings
from flashtrain.tasks.decoders import make_model
from flashtrain_recipes.step_benchmark.cases import StepCase, batches_of, draw_tokens
from flashtrain_recipes.step_benchmark.settings import LORA

_LLAMA = {"vocab_size": 128256, "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
_THREE = {"rope_theta": 500000.0, "rope_type": "default"}
# name of settings.HF_MODELS: (model type, entries of its configuration), as the configurations on the hub have them;
# Llama's scaling of rotary angles, which costs nothing in a step, is left out.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("llama", {
        "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256,
    }),
    "llama-1b": ("llama", {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64, "tie_word_embeddings": True, "rope_parameters": _THREE,
    }),
    "llama-3b": ("llama", {
        **_LLAMA, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "head_dim": 128, "tie_word_embeddings": True, "rope_parameters": _THREE,
    }),
    "llama-8b": ("llama", {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "head_dim": 128, "rope_parameters": _THREE,
    }),
    "qwen3-8b": ("qwen3", {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    }),
}  # fmt: skip


@dataclass(frozen=True)
class HuggingFaceCase(StepCase):
    """A decoder of a published shape, to train at one context, batch and precision of weights."""

    model: str  # a name of SHAPES, to train all weights; with the ending LORA, to train adapters only
    context: int
    weights: str
    base: Settings  # the settings of the run
    batch: int = 1
    layers: int | None = None  # None: as many as the shape has

    def settings(self) -> Settings:
        """Return the settings of recipe=hf that train the case."""
        own = self.settings_of(self.base)
        kind, options = SHAPES[self.model.removesuffix(LORA)]
        layers = {} if self.layers is None else {"num_hidden_layers": self.layers}
        own.model = replace(own.model, name="huggingface", path=None, config=kind, options={**options, **layers})
        own.model.adapter = "lora" if self.model.endswith(LORA) else None
        return own

    @cached_property
    def _on_meta(self) -> Trainable:
        with torch.device("meta"):
            return make_model(self.settings().model, vocab_size=0, context=self.context, attention="flash")

    def draw(self, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
        vocab_size = SHAPES[self.model.removesuffix(LORA)][1]["vocab_size"]
        return draw_tokens(vocab_size, self.batch, self.context, device, seed)

    def flops_per_token(self) -> float:
        return self._on_meta.flops_per_token(self.context)


def cases(settings: Settings) -> list[HuggingFaceCase]:
    """Return a case for every requested model, precision of weights, context and batch."""
    options = settings.benchmark
    return [
        HuggingFaceCase(model, context, weights, settings, batch)
        for model in options.models
        for weights in options.weights
        for context in sorted(options.contexts)
        for batch in batches_of(options, context)
    ]
