"""How a stage's samples are cut into micro-batches."""

from __future__ import annotations

from flashtrain.models.block import GATED
from flashtrain.models.classifier import Classifier
from flashtrain.models.memory_savings import MemorySavings
from flashtrain.settings.settings import divisors
from flashtrain.tasks.batching import Batching, choose_encoder_batching, compiles
from flashtrain.training.hardware import Hardware
from flashtrain.training.memory import EncoderShape, MemoryEstimate, PredictingHead, estimate_encoder_memory
from flashtrain_recipes.arena.build import pixels_read
from flashtrain_recipes.arena.stages import Stage


def choose_stage_batching(stage: Stage, hardware: Hardware, model: Classifier) -> Batching:
    """The micro-batch in samples: as asked; else on a GPU the largest that fits, elsewhere all of a device's share."""
    settings = stage.settings
    share, asked = stage.batch // settings.trainer.ranks, settings.trainer.micro_batch
    config, masked = model.config, settings.masked_pixels
    length = pixels_read(settings, config.length)
    shape = EncoderShape(
        config.layers,
        config.embed,
        config.heads,
        config.ffn,
        gated=config.activation in GATED,
        rotary=config.positions != "learned",
        dropout=config.dropout > 0,
    )
    # Rows that are read a second time with pixels masked, and those that have any.
    again = masked.copies if masked.weight and settings.sequence.classification_weight else 0.0
    hidden = 0.0 if not masked.weight else again or 1.0

    def estimate(size: int, savings: MemorySavings) -> MemoryEstimate:
        rows = size * config.towers
        head = PredictingHead(config.grey_bins, max(1, round(hidden * rows * masked.share * length)))
        return estimate_encoder_memory(
            model.parameter_count(),
            shape,
            tokens=round(rows * (1 + again)) * length,
            longest=length,
            head=head if hidden and config.grey_bins else None,
            precision=hardware.precision,
            savings=savings,
            compiled=compiles(settings, hardware),
            attention=hardware.attention,
            master_weights=settings.optimizer.master_weights,
        )

    return choose_encoder_batching(settings, hardware, [asked] if asked else divisors(share), share, estimate)
