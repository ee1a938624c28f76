"""A stage that fell to chance: the stages after it would build on nothing, for hours perhaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.training.callbacks import held_out_samples
from flashtrain_recipes.arena.intervals import wilson
from flashtrain_recipes.arena.stages import Stage
from flashtrain_recipes.arena.weights import SavedClassifier, write_classifier

CHANCE = 0.5  # of images whose answer is yes or no, which alone have stages
LEARNED = 0.6  # what the stage before must have been above, for the fall to be one


def fell(rows: Sequence[Mapping[str, Any]], stage: Stage) -> bool:
    """Whether no validation of this stage tells it from guessing, though those of the stage before did clearly.

    rows: of the learning curve. The last stage's end is everybody's to see, and the first has none before it.
    """
    settings = stage.settings
    if settings.sequence.classification_weight == 0 or stage.number + 1 == stage.count:
        return False
    images = settings.pathfinder.validation_images
    sequence = settings.sequence
    looked_at = held_out_samples(sequence.validation_samples, settings.trainer.validate_every, sequence.batch)
    count = min(images, looked_at)
    best: dict[int, float] = {}
    for row in rows:
        best[row["stage"]] = max(best.get(row["stage"], 0.0), float(row["validation_accuracy"]))
    here, before = best.get(stage.number + 1), best.get(stage.number)
    if here is None or before is None:
        return False
    return wilson(round(here * count), count)[0] <= CHANCE and wilson(round(before * count), count)[0] > LEARNED


def keep_start(stage: Stage, start: SavedClassifier | None, folder: Path) -> None:
    """Write the weights that a stage after the first begins with into `folder`, as end_if_fallen names them: a run that
    is resumed within the stage has them still."""
    if start is not None and stage.number > 0:
        write_classifier(start, _path(stage, folder))


def forget_start(stage: Stage, folder: Path) -> None:
    """Remove what keep_start wrote: the stage ended well."""
    _path(stage, folder).unlink(missing_ok=True)


def end_if_fallen(rows: Sequence[Mapping[str, Any]], stage: Stage, folder: Path) -> None:
    """Raise UserError where the stage fell to chance, naming the weights that keep_start wrote into `folder`."""
    if not fell(rows, stage):
        return
    path = _path(stage, folder)
    kept = f" The weights that it began with: weights={path}." if path.exists() else ""
    raise UserError(
        f"{stage.name} fell to chance, and the stages after it would begin there: the training ends.{kept} Possible: "
        "smaller steps from stage to stage (contour, drawn_as, side), a lower learning rate, larger batches."
    )


def _path(stage: Stage, folder: Path) -> Path:
    return folder / f"before-stage-{stage.number + 1}.safetensors"
