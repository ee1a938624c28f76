"""What a step of masked-language training holds: rows of masked.token_budget tokens on each device."""

from __future__ import annotations

from flashtrain.errors import UserError
from flashtrain.settings.settings import Settings, divisors

WITHOUT_GPU = 16384  # tokens of a row, at most, where masked.token_budget=null and no GPU's memory says how many


def tokens_per_device(settings: Settings) -> int:
    """Tokens of an optimiser step on one device."""
    return settings.trainer.tokens_per_step // settings.trainer.ranks


def token_budgets(settings: Settings, *, gpu: bool) -> list[int]:
    """What a row may hold, ascending: as asked, or each part of a device's tokens that holds the longest sample."""
    if settings.masked.token_budget is not None:
        return [settings.masked.token_budget]
    found = [size for size in divisors(tokens_per_device(settings)) if size >= settings.context]
    return found if gpu else [size for size in found if size <= WITHOUT_GPU] or found[:1]


def check_masked_step(settings: Settings) -> None:
    """Raise UserError unless a step is whole rows for each device, and a row holds the longest sample."""
    budget, ranks, context = settings.masked.token_budget, settings.trainer.ranks, settings.context
    least = 5 if settings.masked.pairs else 3
    if context < least:
        raise UserError(f"context={context} must be at least {least}: a token and the special ones.")
    if budget is not None and budget < context:
        raise UserError(f"masked.token_budget={budget} must be at least the longest sample, context={context}.")
    tokens, unit = settings.trainer.tokens_per_step, 1 if budget is None else budget
    if tokens % (unit * ranks):
        near = max(1, tokens // (unit * ranks)) * unit * ranks
        rows = "" if budget is None else f"masked.token_budget={budget} tokens on "
        raise UserError(
            f"trainer.tokens_per_step={tokens} is no multiple of {rows}{ranks} "
            f"{'device' if ranks == 1 else 'devices'}: {near} would do."
        )
    if tokens_per_device(settings) < context:
        raise UserError(
            f"trainer.tokens_per_step={tokens} gives a device {tokens_per_device(settings)} tokens, and the longest "
            f"sample has context={context}."
        )
    if settings.trainer.strategy == "fsdp":
        raise UserError("trainer.strategy=fsdp shards models too large for one device; BERT takes ddp.")
    if settings.trainer.micro_batch is not None:
        raise UserError(
            f"trainer.micro_batch={settings.trainer.micro_batch} counts samples of one length: "
            "masked.token_budget says how many tokens a device computes at once."
        )
