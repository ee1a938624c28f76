"""The checkpoint from which a training of classifiers resumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.folders.run_folder import CHECKPOINTS, CONFIG_FILE, LAST, find_checkpoint
from flashtrain.models.classifier_config import ClassifierConfig
from flashtrain.run.train import check_same_model
from flashtrain.settings.settings import Settings
from flashtrain.training.checkpoints import check_resumable, read_checkpoint
from flashtrain_recipes.arena.build import TASK
from flashtrain_recipes.arena.learning_curve import LearningCurve
from flashtrain_recipes.arena.stages import Stage
from flashtrain_recipes.arena.weights import SavedClassifier, read_classifier

# Entries of a model's configuration that may change when a training resumes: none
# of them has weights.
_FREE = ("dropout", "pattern", "pattern_block", "pattern_local", "pattern_globals")


@dataclass
class Resumed:
    """A checkpoint from which a training in stages resumes, with the stage and
    step that it was saved at."""

    checkpoint: Path
    stage: int  # its number, from 0
    step: int  # optimizer steps of that stage that are done
    curve: dict[str, Any] | None  # the learning curve's state
    saved: SavedClassifier  # to start the next stage from where this one is done


def is_carried(given: str) -> bool:
    """Return whether resume=... names a checkpoint file outside of any run folder, from
    which a new run resumes."""
    path = Path(given).expanduser()
    return path.is_file() and not (path.parent.parent / CONFIG_FILE).is_file()


def find_resumed(settings: Settings, folder: Path, stages: Sequence[Stage]) -> Resumed | None:
    """Return the checkpoint to resume from, where the setting `resume` is given: the last one in
    `folder`, else the one that `resume` names (a run or a file); None to start anew.

    Raises:
        UserError: the checkpoint belongs to another task, or to a stage that this
            training does not have.
    """
    if settings.resume is None:
        return None
    own = folder / CHECKPOINTS / LAST
    if own.exists():  # a run that was begun from a carried file, and goes on
        checkpoint = own
    elif settings.resume == "auto":
        return None
    elif is_carried(settings.resume):
        checkpoint = Path(settings.resume).expanduser()
    else:
        _, checkpoint = find_checkpoint(settings.resume, prefer=LAST, setting="resume")
    saved = read_classifier(checkpoint)
    stage = int(saved.notes.get("stage", 0))
    if saved.notes.get("task") != TASK or stage >= len(stages):
        raise UserError(
            f"resume: {checkpoint} is of another task, or of stage {stage + 1} where this run has "
            f"{len(stages)} stages. Use the settings that it was trained with."
        )
    whole = read_checkpoint(checkpoint, mmap=True, checked=True)
    check_resumable(whole, checkpoint)
    curve = whole.get("callbacks", {}).get(LearningCurve.__qualname__)
    return Resumed(checkpoint, stage, int(saved.notes["step"]), curve, saved)


def check_same(resumed: Resumed, config: ClassifierConfig) -> None:
    """Raise UserError, which names the settings that differ, unless the checkpoint's model has
    this configuration; settings without weights, as dropout, may differ."""
    shapes = [asdict(one) for one in (resumed.saved.config, config)]
    there, here = (
        {"name": TASK, "shape": {name: one[name] for name in one if name not in _FREE}}
        for one in shapes
    )
    check_same_model(resumed.checkpoint, {"flashtrain": there}, here)
