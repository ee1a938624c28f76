"""Choose the micro-batch of BERT on masked text: the tokens that a device computes at once."""

from __future__ import annotations

import math

from flashtrain.errors import UserError, at_least
from flashtrain.models.activation_checkpointing import MemorySavings
from flashtrain.models.bert import Bert
from flashtrain.models.bert_config import BertConfig
from flashtrain.settings.settings import Settings, divisors
from flashtrain.tasks.batching import Batching, choose_micro_batch, compiles, encoder_blocks
from flashtrain.training.encoder_memory import PredictingHead, estimate_encoder_memory
from flashtrain.training.hardware import Hardware
from flashtrain.training.memory import MemoryEstimate
from flashtrain.training.memory_choice import Estimate

# Tokens of a row where masked.token_budget=null and no GPU's memory says how many.
MAX_ROW_ON_CPU = 16384
# Tokens of a padded batch over its budget, where paragraphs of 82 tokens in the mean are cut at
# 512: of books, and of Python's standard library.
PADDED_PARAGRAPHS = 6.3


def check_masked_step(settings: Settings) -> None:
    """Raise UserError unless a step is a whole number of rows on each device, and a row holds the
    longest sample."""
    budget, ranks, context = settings.masked.token_budget, settings.trainer.ranks, settings.context
    at_least("context", context, 3)  # a token and the special ones
    at_least("masked.token_budget", budget, context)  # the longest sample
    tokens, row = settings.trainer.tokens_per_step, budget or 1
    if tokens % (row * ranks):
        near = max(1, tokens // (row * ranks)) * row * ranks
        rows = "" if budget is None else f"masked.token_budget={budget} tokens on "
        raise UserError(
            f"trainer.tokens_per_step={tokens} must be a multiple of {rows}{ranks} "
            f"{'device' if ranks == 1 else 'devices'}. Use {near}."
        )
    at_least("trainer.tokens_per_step", tokens, context * ranks)
    if settings.trainer.micro_batch is not None:
        raise UserError(
            f"trainer.micro_batch={settings.trainer.micro_batch} counts samples of one length. "
            "Use masked.token_budget, the tokens that a device computes at once."
        )


def tokens_per_device(settings: Settings) -> int:
    """Return the tokens of an optimizer step on one device."""
    return settings.trainer.tokens_per_step // settings.trainer.ranks


def choose_masked_batching(
    settings: Settings, hardware: Hardware, model: Bert, padding: float | None = None
) -> Batching:
    """Choose how many tokens a row holds (the micro-batch), and the memory savings.

    Args:
        padding: tokens computed, padding included, for each token of the budget
            (MaskedTextDataModule.padding); None: a usual value.
    """
    layout = settings.masked.layout
    share = settings.masked.mlm_probability
    sizes = settings.masked.token_budget
    if padding is None:
        padding = PADDED_PARAGRAPHS if layout == "padded" else 1.0
    if sizes is None:
        found = [size for size in divisors(tokens_per_device(settings)) if size >= settings.context]
        few = [size for size in found if size <= MAX_ROW_ON_CPU] or found[:1]
        sizes = found if hardware.kind == "cuda" else few
    parameters = model.parameter_count()
    estimate = bert_estimate(
        settings, hardware, model.config, parameters, layout, padding, share=share
    )
    return choose_micro_batch(settings, hardware, sizes, tokens_per_device(settings), estimate)


def bert_estimate(
    settings: Settings,
    hardware: Hardware,
    config: BertConfig,
    parameters: int,
    layout: str,
    tokens_each: float,
    *,
    share: float = 0.0,
) -> Estimate:
    """Return a function that estimates the memory of a micro-batch of BERT.

    Args:
        parameters: the model's number of parameters.
        layout: "packed", or "padded", which is not compiled.
        tokens_each: tokens that a micro-batch computes, padding included, for each unit of its
            size.
        share: the fraction of the tokens that is masked.
    """
    blocks = encoder_blocks(config)

    def estimate(size: int, savings: MemorySavings) -> MemoryEstimate:
        tokens = math.ceil(size * tokens_each)
        return estimate_encoder_memory(
            parameters,
            blocks,
            tokens=tokens,
            max_seqlen=settings.context,
            head=PredictingHead(config.vocab_rows, math.ceil(share * tokens))
            if config.masked_head
            else None,
            precision=hardware.precision,
            savings=savings,
            compiled=compiles(settings, hardware, layout),
            attention=hardware.attention,
            master_weights=settings.optimizer.master_weights,
        )

    return estimate
