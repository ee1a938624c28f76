"""The summary row of a run that trains a classifier, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashtrain.announce import say
from flashtrain.settings.settings import Settings
from flashtrain_recipes.arena.stages import stages_of


def model_name(settings: Settings) -> str:
    """Such as classifier-4x128: layers and width."""
    return f"classifier-{settings.classifier.layers}x{settings.classifier.embed}"


def trained_columns(settings: Settings) -> dict[str, Any]:
    """What is trained, known beforehand. side, batch, context: the last stage's; steps, samples: of all, at most."""
    stages = stages_of(settings)
    last = stages[-1].settings
    image = last.sequence.data == "pathfinder"
    return {
        "model": model_name(settings),
        "data": last.sequence.data,
        "side": last.pathfinder.side if image else None,
        "context": last.pathfinder.side**2 if image else last.sequence.length,
        "stages": len(stages),
        "batch": stages[-1].batch,
        "steps": sum(stage.steps for stage in stages),
        "samples": sum(stage.samples for stage in stages),
        "devices": settings.trainer.ranks,
    }


def say_classified(row: dict[str, Any], folder: Path, settings: Settings) -> None:
    """Print what came out of a run, where it is, and what to try next."""
    mfu = "" if row.get("mfu") is None else f", MFU {row['mfu']:.1%}"
    memory = "" if row.get("peak_memory_gib") is None else f", peak memory {row['peak_memory_gib']:.2f} GiB"
    speed = (
        "" if row.get("samples_per_second") is None else f"{row['samples_per_second']:,.1f} samples/s{mfu}{memory}, "
    )
    what = row["data"] if row.get("side") is None else f"{row['data']}, side {row['side']}"
    accuracy, loss = row.get("validation_accuracy"), row.get("validation_loss")
    labelled = settings.sequence.classification_weight > 0 or bool(settings.curriculum.stages)
    found = "" if accuracy is None else f"accuracy {accuracy:.2%} held out, "
    if not labelled:
        found = "" if loss is None else f"loss {loss:.4f} of what is masked, held out, "
    say("")
    say(f"finished {row['model']} on {what}: {found}after {row['samples']:,} samples")
    say(f"  {speed}{row['seconds']:.0f} s for the whole command")
    say(f"  run folder {folder} (summary.json, learning_curve.csv), checkpoints in {folder / 'checkpoints'}")
    then = f"mode=evaluate checkpoint={folder}" if labelled else f"recipe={settings.recipe} weights={folder}"
    say(f"  try next: python -m flashtrain {then}")
