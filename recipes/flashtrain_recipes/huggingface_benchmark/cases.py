"""The cases of recipe=hf-speed and hf-long: decoders of published models'
shapes, with random weights.

B batch, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
from flashtrain.models.trainable import Trainable
from flashtrain.settings.settings import Settings
from flashtrain.tasks.context_run import check_model
from flashtrain.tasks.decoders import make_model
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.harness.rows import Row
from flashtrain_recipes.step_benchmark.cases import StepCase, draw_tokens
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
    documents: int = 1  # packed in each row

    def settings(self) -> Settings:
        """Return the settings of recipe=hf that train the case."""
        own = self.settings_of(self.base)
        own.data.document_mask = self.documents > 1
        layers = {} if self.layers is None else {"num_hidden_layers": self.layers}
        options = {**own.model.options, **layers}
        shape = self.model.removesuffix(LORA)
        own.model = replace(own.model, name="huggingface", path=None, config=shape, options=options)
        own.model.adapter = "lora" if self.model.endswith(LORA) else None
        return own

    @cached_property
    def _on_meta(self) -> Trainable:
        return make_model(
            self.settings().model, vocab_size=0, context=self.context, attention="flash"
        )

    def decoder(self, hardware: Hardware) -> HuggingFaceDecoder:
        """Return the model on the meta device (without weights), in the hardware's precision."""
        settings, attention = self.settings(), hardware.attention
        model = make_model(settings.model, vocab_size=0, context=self.context, attention=attention)
        check_model(settings.sharding, model, settings.model.name)
        model.keep_in(hardware.precision)
        return cast(HuggingFaceDecoder, model)

    @cached_property
    def positions(self) -> Tensor:
        """Of a row's tokens, (S,), in documents as long as 1, 2, 3, ... parts of it."""
        number, tokens = torch.arange(self.documents), torch.arange(self.context)
        begins = self.context * number * (number + 1) // (self.documents * (self.documents + 1))
        return tokens - begins[torch.searchsorted(begins, tokens, right=True) - 1]

    def draw(self, device: torch.device, seed: int) -> tuple[Tensor, ...]:
        """Return tokens and labels; of packed rows positions and documents too, all (B, S)."""
        vocab_size = self._on_meta.shape.vocab_size  # type: ignore[union-attr]
        drawn = draw_tokens(vocab_size, self.batch, self.context, device, seed)
        packed = (self.positions, (self.positions == 0).cumsum(0)) if self.documents > 1 else ()
        return *drawn, *(one.expand(self.batch, -1).to(device) for one in packed)

    def flops_per_token(self) -> float:
        # Of the causal sequence that needs as many FLOPs as the row's documents.
        return self._on_meta.flops_per_token(round(2 * self.positions.double().mean().item() + 1))

    def columns(self) -> Row:
        return super().columns() | ({"documents": self.documents} if self.documents > 1 else {})

    def __str__(self) -> str:
        return super().__str__() + (f" {self.documents} documents" if self.documents > 1 else "")
