"""What BERT needs of a GPU's memory, under any of its heads: the estimate as batching takes it."""

from __future__ import annotations

import math

from flashtrain.models.bert_encoder import BertConfig
from flashtrain.models.block import GATED
from flashtrain.models.memory_savings import MemorySavings
from flashtrain.settings.settings import Settings
from flashtrain.tasks.batching import compiles
from flashtrain.training.hardware import Hardware
from flashtrain.training.memory import EncoderShape, MemoryEstimate, PredictingHead, estimate_encoder_memory
from flashtrain.training.memory_choice import Estimate


def bert_estimate(
    settings: Settings,
    hardware: Hardware,
    config: BertConfig,
    parameters: int,
    *,
    layout: str,
    tokens_each: float = 1,
) -> Estimate:
    """The estimate for micro-batches of so many times `tokens_each` tokens, padding included, of a model of this shape.

    layout: packed, or padded, which is not compiled."""
    shape = EncoderShape(
        config.layers,
        config.embed,
        config.heads,
        config.ffn,
        gated=config.activation in GATED,
        rotary=config.positions == "rotary",
        dropout=config.dropout > 0,
        residual=settings.bert.residual,
    )

    def estimate(size: int, savings: MemorySavings) -> MemoryEstimate:
        tokens = math.ceil(size * tokens_each)
        labels = math.ceil(settings.masked.share * tokens)
        return estimate_encoder_memory(
            parameters,
            shape,
            tokens=tokens,
            longest=settings.context,
            head=PredictingHead(config.vocab_rows, labels) if config.masked_head else None,
            precision=hardware.precision,
            savings=savings,
            compiled=compiles(settings, hardware, layout),
            attention=hardware.attention,
            master_weights=settings.optimizer.master_weights,
        )

    return estimate
