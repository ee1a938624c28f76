"""The summary row of a run: flat, one value a key, the same keys whatever was trained."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from flashtrain.announce import say
from flashtrain.data.datamodule import TextDataModule
from flashtrain.models.trainable import Trainable
from flashtrain.run.run_folder import FINISHED
from flashtrain.settings.settings import Settings
from flashtrain.tasks import LanguageModel
from flashtrain.tasks.spec import mode_of, task_of
from flashtrain.training.hardware import Hardware
from flashtrain.training.throughput import Throughput
from flashtrain.training.versions import versions


def planned_row(settings: Settings, hardware: Hardware, overrides: list[str]) -> dict[str, Any]:
    """The part of the row that is known beforehand; a failed run's row is this with `status` and `error`."""
    common = {"attention": hardware.attention, "precision": hardware.precision}
    mode = mode_of(settings)
    trained = {} if mode is not None and mode.measures else {**task_of(settings).columns(settings), **common}
    return {
        "recipe": settings.recipe,
        "date": time.strftime("%Y-%m-%d"),
        **trained,
        "device": hardware.name,
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "overrides": " ".join(overrides),
    }


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


def finished_row(
    settings: Settings,
    hardware: Hardware,
    *,
    model: Trainable,
    task: LanguageModel,
    data: TextDataModule,
    throughput: Throughput,
    micro_batch: int,
    validation_loss: float | None,
    steps: int,
    seconds: float,
    overrides: list[str],
) -> dict[str, Any]:
    """The row of a run that went to its end. Losses in nats a token, memory in GiB, time in seconds."""
    measured = throughput.summary()
    return {
        **planned_row(settings, hardware, overrides),
        "status": FINISHED,
        "parameters": model.parameter_count(),
        "micro_batch": micro_batch,
        "steps": steps,
        "tokens": steps * settings.trainer.tokens_per_step,
        "epochs": round(data.epochs_seen, 3),
        "train_loss_first": task.first_loss,
        "train_loss": task.last_loss,
        "validation_loss": validation_loss,
        "tokens_per_second": measured["tokens_per_second"],
        "step_seconds": measured["step_seconds_median"],
        "mfu": measured["mfu"],
        "peak_memory_gib": measured["peak_memory_gib"],
        "seconds": round(seconds, 1),
    }


def failed_row(settings: Settings, hardware: Hardware, overrides: list[str], status: str, error: str) -> dict[str, Any]:
    """The row of a run that did not finish: `status` is FAILED, OUT_OF_MEMORY or STOPPED."""
    return {**planned_row(settings, hardware, overrides), "status": status, "error": error}


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
