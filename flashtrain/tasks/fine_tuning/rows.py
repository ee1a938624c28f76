"""The summary row of a run that fine-tunes BERT, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashtrain.announce import say
from flashtrain.settings.settings import Settings
from flashtrain.tasks.masked_language.rows import bert_name


def fine_tuning_columns(settings: Settings) -> dict[str, Any]:
    """What is trained, known beforehand."""
    asked = settings.finetune
    return {
        "model": bert_name(settings),
        "data": data_name(settings),
        "target": asked.target,
        "context": settings.context,
        "batch": asked.batch,
        "steps": settings.trainer.steps,
        "samples": settings.trainer.steps * asked.batch,
        "devices": settings.trainer.ranks,
    }


def data_name(settings: Settings) -> str:
    """The texts in a word: cues, the file's or folder's name, or the dataset's."""
    asked = settings.finetune
    if asked.data == "cues":
        return "cues"
    return (
        Path(asked.path).name
        if asked.path and asked.data == "files"
        else " ".join(filter(None, (asked.name, asked.config)))
    )


def score_of(row: dict[str, Any]) -> str:
    """The score in words, such as micro-F1 0.871."""
    if row.get("micro_f1") is not None:
        bound = "" if row.get("best_micro_f1") is None else f" (at most {row['best_micro_f1']:.3f} can be expected)"
        return f"micro-F1 {row['micro_f1']:.3f}{bound}"
    return "no score" if row.get("accuracy") is None else f"accuracy {row['accuracy']:.2%}"


def say_fine_tuned(row: dict[str, Any], folder: Path, settings: Settings) -> None:
    """Print what came out of a run, where it is, and what to try next."""
    mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.1%}"
    memory = "" if row["peak_memory_gib"] is None else f", peak memory {row['peak_memory_gib']:.2f} GiB"
    speed = "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f} real tokens/s{mfu}{memory}, "
    say("")
    say(
        f"finished {row['model']} on {row['data']}, context {row['context']:,}: {score_of(row)}, "
        f"on {row['scored']} texts"
    )
    say(f"  {speed}{row['samples']:,} texts trained on, {row['seconds']:.0f} s for the whole command")
    say(f"  run folder {folder} (config.yaml, summary.json, metrics.csv), checkpoints in {folder / 'checkpoints'}")
    say(f"  try next: python -m flashtrain mode=evaluate checkpoint={folder}")
