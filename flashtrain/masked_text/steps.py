"""What a step of masked-language training holds: rows of masked.token_budget tokens on each device."""

from __future__ import annotations

from flashtrain.errors import UserError
from flashtrain.settings import Settings


def rows_per_device(settings: Settings) -> int:
    """Micro-batches that a device accumulates for one optimiser step."""
    return settings.trainer.tokens_per_step // (settings.masked.token_budget * settings.trainer.ranks)


def check_masked_step(settings: Settings) -> None:
    """Raise UserError unless a step is whole rows for each device, and a row holds the longest sample."""
    budget, ranks, context = settings.masked.token_budget, settings.trainer.ranks, settings.context
    least = 5 if settings.masked.pairs else 3
    if context < least:
        raise UserError(f"context={context} must be at least {least}: a token and the special ones.")
    if budget < context:
        raise UserError(f"masked.token_budget={budget} must be at least the longest sample, context={context}.")
    tokens = settings.trainer.tokens_per_step
    if tokens % (budget * ranks):
        near = max(1, tokens // (budget * ranks)) * budget * ranks
        raise UserError(
            f"trainer.tokens_per_step={tokens} is no multiple of masked.token_budget={budget} tokens on {ranks} "
            f"{'device' if ranks == 1 else 'devices'}: {near} would do."
        )
    if settings.trainer.strategy == "fsdp":
        raise UserError("trainer.strategy=fsdp shards models too large for one device; BERT takes ddp.")
    if settings.trainer.micro_batch is not None:
        raise UserError(
            f"trainer.micro_batch={settings.trainer.micro_batch} counts samples of one length: "
            "masked.token_budget says how many tokens a device computes at once."
        )
