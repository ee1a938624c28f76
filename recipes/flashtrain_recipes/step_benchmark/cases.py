"""What is trained: a GPT-2 of one size at one context, its weights in one precision, with random tokens.

B batch, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.models.gpt2 import GPT2, GPT2Config
from flashtrain.settings.settings import Settings
from flashtrain.tasks.planning import VOCABULARY

MASTERS = "bf16-master"


class WeightsHeld:
    """Of a case: weights: "fp32" (autocast), "bf16" (and nothing in float32) or "bf16-master" (with float32 copies that
    the optimiser updates)."""

    weights: str

    @property
    def is_bfloat16(self) -> bool:
        """Whether the weights that multiply are held in bfloat16."""
        return self.weights != "fp32"

    @property
    def has_masters(self) -> bool:
        """Whether the optimiser keeps float32 copies of them."""
        return self.weights == MASTERS


@dataclass(frozen=True)
class StepCase(WeightsHeld):
    """model: a name of models.gpt2.SIZES. context: S.

    vocab_size: tokens; vocab_rows: rows of every implementation's embedding table, None for vocab_size rounded up to
    a multiple of 64.
    """

    model: str
    context: int
    weights: str
    vocab_size: int
    vocab_rows: int | None = None

    def __str__(self) -> str:
        return f"{self.model} S={self.context} weights {self.weights}"

    def config(self) -> GPT2Config:
        """The shape that every implementation builds."""
        return GPT2Config.of_size(
            self.model, vocab_size=self.vocab_size, context=self.context, vocab_rows=self.vocab_rows
        )

    def draw(self, batch: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
        """Random tokens and labels, each (B, S) int64, labels[b, s] the token after tokens[b, s]; equal for equal
        seeds."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(self.vocab_size, (batch, self.context + 1), generator=generator).to(device)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    def flops_per_token(self) -> float:
        """Model FLOPs of one token's forward and backward: 6 N + 12 layers E S / 2 (GPT2.flops_per_token).

        The same for every implementation, whatever it computes twice or in vain.
        """
        return _flops_per_token(self.config())


@cache
def _flops_per_token(config: GPT2Config) -> float:
    with torch.device("meta"):
        return GPT2(config, attention="sdpa").flops_per_token(config.context)


def cases(settings: Settings) -> list[StepCase]:
    """Every model, context and precision of weights asked for. Raises UserError for a model that is not GPT-2."""
    if settings.model.name != "gpt2":
        raise UserError(
            f"model={settings.model.name}: training steps of model=gpt2 are measured, which others have too."
        )
    asked = settings.benchmark
    vocab_size = VOCABULARY.get(settings.data.tokenizer, settings.data.vocab_size)
    return [
        StepCase(model, context, weights, vocab_size, settings.model.vocab_rows)
        for model in asked.models
        for weights in asked.weights
        for context in asked.contexts
    ]
