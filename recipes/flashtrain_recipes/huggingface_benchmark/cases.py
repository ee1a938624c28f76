"""The cases of recipe=hf-speed and hf-long: decoders of published models'
shapes, with random weights.

B batch, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from flashtrain.integrations.huggingface_config import published_shapes
from flashtrain.models.trainable import Trainable
from flashtrain.settings.settings import Settings
from flashtrain.tasks.decoders import make_model
from flashtrain_recipes.step_benchmark.cases import StepCase, batches_of, draw_tokens
from flashtrain_recipes.step_benchmark.settings import LORA


@dataclass(frozen=True)
class HuggingFaceCase(StepCase):
    """A decoder of a published shape, to train at one context, batch and precision of weights."""

    # A name of conf/decoder_shapes.yaml, to train all weights; with the ending LORA, to
    # train adapters only.
    model: str
    context: int
    weights: str
    base: Settings  # the settings of the run
    batch: int = 1
    layers: int | None = None  # None: as many as the shape has

    def settings(self) -> Settings:
        """Return the settings of recipe=hf that train the case."""
        own = self.settings_of(self.base)
        layers = {} if self.layers is None else {"num_hidden_layers": self.layers}
        shape = self.model.removesuffix(LORA)
        own.model = replace(own.model, name="huggingface", path=None, config=shape, options=layers)
        own.model.adapter = "lora" if self.model.endswith(LORA) else None
        return own

    @cached_property
    def _on_meta(self) -> Trainable:
        with torch.device("meta"):
            return make_model(
                self.settings().model, vocab_size=0, context=self.context, attention="flash"
            )

    def draw(self, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
        vocab_size = published_shapes()[self.model.removesuffix(LORA)]["vocab_size"]
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
