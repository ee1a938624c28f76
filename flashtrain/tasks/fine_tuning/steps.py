"""What a step of fine-tuning holds, and how a device cuts its share into micro-batches."""

from __future__ import annotations

from flashtrain.errors import UserError
from flashtrain.settings.settings import Settings, divisors


def texts_per_device(settings: Settings) -> int:
    """Texts of an optimiser step on one device."""
    return settings.finetune.batch // settings.trainer.ranks


def micro_batches(settings: Settings) -> list[int]:
    """Texts that a device may compute at once, ascending: as asked, or those that finetune.tokens_at_once holds."""
    if settings.trainer.micro_batch is not None:
        return [settings.trainer.micro_batch]
    most = max(1, settings.finetune.tokens_at_once // settings.context)
    return [size for size in divisors(texts_per_device(settings)) if size <= most]


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
