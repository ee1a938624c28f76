"""The summary row of a run that trains BERT on masked text, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashtrain.announce import say
from flashtrain.settings.settings import Settings


def bert_name(settings: Settings) -> str:
    """Such as bert-large or modern-base; the folder's name where training started from given weights."""
    if settings.weights is not None:
        return Path(settings.weights).name
    return f"{settings.bert.family}-{settings.bert.size}"


def masked_columns(settings: Settings) -> dict[str, Any]:
    """What is trained, known beforehand."""
    asked = settings.masked
    return {
        "model": bert_name(settings),
        "unit": asked.unit,
        "layout": asked.layout,
        "context": settings.context,
        "token_budget": asked.token_budget,
        "optimizer": settings.optimizer.name,
        "steps": settings.trainer.steps,
        "devices": settings.trainer.ranks,
    }


def say_masked(row: dict[str, Any], folder: Path, settings: Settings) -> None:
    """Print what came out of a run, where it is, and what to try next."""
    held_out = "" if row["validation_loss"] is None else f" (held-out {row['validation_loss']:.3f})"
    accuracy = "" if row["validation_accuracy"] is None else f", accuracy {row['validation_accuracy']:.2%} held out"
    mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.1%}"
    memory = "" if row["peak_memory_gib"] is None else f", peak memory {row['peak_memory_gib']:.2f} GiB"
    say("")
    loss = "" if row["train_loss"] is None else f": loss {_number(row['train_loss_first'])} -> {row['train_loss']:.3f}"
    say(f"finished {row['model']}{loss}{held_out}{accuracy}, after {row['tokens']:,} real tokens")
    if row["seconds_to_target"] is not None:
        say(
            f"  target accuracy {row['target_accuracy']:g} reached after {row['steps']} steps and "
            f"{row['seconds_to_target']:.1f} s of training"
        )
    elif row["target_accuracy"] is not None:
        say(f"  target accuracy {row['target_accuracy']:g} was not reached in {row['steps']} steps")
    if row["tokens_per_second"] is not None:
        fill = "" if row["fill"] is None else f", rows {row['fill']:.1%} full, costliest {row['evenness']:.3f} of mean"
        say(
            f"  {row['tokens_per_second']:,.0f} real tokens/s, {row['rows_per_second']:,.1f} samples/s"
            f"{mfu}{memory}{fill}"
        )
    say(f"  {row['seconds']:.0f} s for the whole command")
    say(f"  run folder {folder} (config.yaml, summary.json, metrics.csv), checkpoints in {folder / 'checkpoints'}")
    say(f"  try next: python -m flashtrain mode=evaluate checkpoint={folder}")


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"
