"""The summary row of a run that trains a language model, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashtrain.announce import say
from flashtrain.settings.settings import Settings


def language_columns(settings: Settings) -> dict[str, Any]:
    """What a language model's run trains, known beforehand."""
    return {
        "model": model_name(settings),
        "context": settings.context,
        "batch": settings.samples_per_step,
        "steps": settings.trainer.steps,
        "tokens": settings.trainer.steps * settings.trainer.tokens_per_step,
        "devices": settings.trainer.ranks,
    }


def model_name(settings: Settings) -> str:
    """Family and size, such as gpt2-124m; the folder's name where training started from given weights."""
    if settings.weights is not None:
        return Path(settings.weights).name
    return f"{settings.model.name}-{settings.model.size}"


def say_summary(row: dict[str, Any], folder: Path, prompt: str) -> None:
    """Print what came out of a run, where it is, and what to try next."""
    held_out = "" if row["validation_loss"] is None else f" (held-out {row['validation_loss']:.3f})"
    mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.1%}"
    memory = "" if row["peak_memory_gib"] is None else f", peak memory {row['peak_memory_gib']:.2f} GiB"
    first = "" if row["train_loss_first"] is None else f"{row['train_loss_first']:.3f} -> "
    # A run that was ended after its last step, and resumed, trains no more.
    loss = "" if row["train_loss"] is None else f" loss {first}{row['train_loss']:.3f}"
    speed = "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f} tokens/s{mfu}{memory}, "
    say("")
    say(f"finished {row['model']}:{loss}{held_out} after {row['tokens']:,} tokens")
    say(f"  {speed}{row['seconds']:.0f} s for the whole command")
    say(f"  run folder {folder} (config.yaml, summary.json, metrics.csv), checkpoints in {folder / 'checkpoints'}")
    say(f'  try next: python -m flashtrain mode=generate checkpoint={folder} prompt="{prompt}"')
