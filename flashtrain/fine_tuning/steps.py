"""What a step of fine-tuning holds, and how a device cuts its share into micro-batches."""

from __future__ import annotations

from flashtrain.errors import UserError
from flashtrain.settings import Settings, divisors


def micro_batch(settings: Settings) -> int:
    """Texts that a device computes at once: as asked, or as many as hold finetune.tokens_at_once."""
    if settings.trainer.micro_batch is not None:
        return settings.trainer.micro_batch
    share = settings.finetune.batch // settings.trainer.ranks
    most = max(1, settings.finetune.tokens_at_once // settings.context)
    return max(size for size in divisors(share) if size <= most)


def accumulate(settings: Settings) -> int:
    """Micro-batches of a step on a device."""
    return settings.finetune.batch // settings.trainer.ranks // micro_batch(settings)


def check_fine_tuning_step(settings: Settings) -> None:
    """Raise UserError unless the texts of a step divide over devices and micro-batches, and their source is named."""
    settings.finetune.check_data()
    if settings.context < 3:
        raise UserError(f"context={settings.context} must be at least 3: a token and the special ones.")
    batch, ranks, micro = settings.finetune.batch, settings.trainer.ranks, settings.trainer.micro_batch
    if batch % ranks:
        raise UserError(f"a step of finetune.batch={batch} texts does not divide over {ranks} devices.")
    if micro is not None and (batch // ranks) % micro:
        raise UserError(
            f"trainer.micro_batch={micro} does not divide the {batch // ranks} texts a device takes a step: "
            f"choose one of {', '.join(map(str, divisors(batch // ranks)))}."
        )
    if settings.trainer.strategy == "fsdp":
        raise UserError("trainer.strategy=fsdp shards models too large for one device; BERT takes ddp.")
