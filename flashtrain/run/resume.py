"""Which checkpoint a training goes on from, and whether it is of the same model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashtrain.announce import say
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import CHECKPOINTS, FINISHED, LAST, find_checkpoint, read_summary
from flashtrain.settings.settings import Settings
from flashtrain.training.checkpoints import read_checkpoint
from flashtrain.training.resuming import check_resumable

PLAIN = (bool, int, float, str, list, type(None))  # what a description consists of


def check_same_model(
    checkpoint: Path, saved: Mapping[str, Any], description: dict[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Raise UserError unless what was saved in the checkpoint is of the model described, naming what differs.

    defaults: what a field of the shape is where the checkpoint names none, since its flashtrain knew none.
    """
    notes = saved.get("flashtrain", {})
    values = notes.get("shape", {}) if isinstance(notes, dict) else None
    if not isinstance(values, dict) or not all(isinstance(one, PLAIN) for one in (notes.get("name"), *values.values())):
        raise UserError(f"{checkpoint} is damaged: it does not say which model it holds.")
    here = {"name": description["name"], **description["shape"]}
    there = {**defaults, "name": notes.get("name"), **values}
    differing = [key for key in here if here[key] != there.get(key)]
    if differing:
        parts = ", ".join(f"{key} is {there.get(key)} there and {here[key]} here" for key in differing)
        raise UserError(f"{checkpoint} is a checkpoint of another model: {parts}.")


def checkpoint_to_resume(
    settings: Settings, folder: Path, description: dict[str, Any], defaults: Mapping[str, Any]
) -> Path | None:
    """The checkpoint to go on from: of the run named, or, for resume=auto, of the folder that was found unfinished.

    None to start anew. Raises UserError unless it holds the model described.
    """
    if settings.resume is None:
        return None
    if settings.resume == "auto":
        checkpoint = folder / CHECKPOINTS / LAST
        if not checkpoint.exists():
            return None
    else:
        _, checkpoint = find_checkpoint(settings.resume, prefer=LAST, setting="resume")
    saved = read_checkpoint(checkpoint, mmap=True)  # of all its weights nothing is read here
    check_same_model(checkpoint, saved, description, defaults)
    _check_steps_left(checkpoint, check_resumable(saved, checkpoint), settings.trainer.steps)
    say(f"resuming from {checkpoint}")
    return checkpoint


def _check_steps_left(checkpoint: Path, made: int, steps: int) -> None:
    """Raise UserError where the run has made all its steps: it would write a row of nothing over its own. One that
    ended between its last step and its summary still has that to make."""
    finished = read_summary(checkpoint.parent.parent).get("status") == FINISHED
    if made > steps or (made == steps and finished):
        raise UserError(
            f"{checkpoint} has made {made:,} steps, and trainer.steps={steps}: nothing is left to train. Possible: "
            f"trainer.steps= above {made}, or a run of its own without resume=."
        )
