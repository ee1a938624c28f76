"""The stages of a training; each has the run's settings, changed by its entry in
curriculum.stages."""

from __future__ import annotations

from dataclasses import dataclass

from flashtrain.errors import UserError
from flashtrain.models.block_pattern import DENSE, TILED, check_tiles
from flashtrain.settings.settings import Settings
from flashtrain.tasks.stages import TrainingStage, changed_by
from flashtrain_recipes.arena.pathfinder.parameters import contour_words


@dataclass(frozen=True)
class Stage(TrainingStage):
    """One stage of a curriculum, and the accuracy that ends it early."""

    entry: int = 0  # index of its entry in curriculum.stages
    # The held-out accuracy that ends it early; None: it never does.
    stop_at_accuracy: float | None = None

    @property
    def name(self) -> str:
        """The stage in words, as "stage 2 of 3, side 64, hard contours"; a single stage is
        "side 64" or the data."""
        sequence, images = self.settings.sequence, self.settings.pathfinder
        what = f"side {images.side}" if sequence.data == "pathfinder" else sequence.data
        if self.count == 1:
            return what
        return f"stage {self.number + 1} of {self.count}, {what}, {contour_words(images.contour)}"

    @property
    def batch(self) -> int:
        """The samples of an optimizer step, over all devices."""
        return self.settings.sequence.batch

    @property
    def samples(self) -> int:
        """The most samples that the whole stage reads."""
        return self.steps * self.batch


def stages_of(settings: Settings) -> list[Stage]:
    """Return the stages to train, at least one. Raises UserError for settings that
    contradict one another."""
    given = settings.curriculum.stages
    if given and settings.sequence.data != "pathfinder":
        raise UserError(
            f"curriculum.stages with sequence.data={settings.sequence.data}: "
            "stages need images of growing sides. Expected sequence.data=pathfinder."
        )
    own = [
        (entry, changed_by(settings, one, f"curriculum.stages[{entry}]"), stage.stop_at_accuracy)
        for entry, stage in enumerate(given)
        for one in stage.each_stage()
    ] or [(0, settings, None)]
    for _, one, accuracy in own:
        one.check_share("sequence.batch", one.sequence.batch)
        if one.sequence.data == "pathfinder" and one.classifier.pattern in TILED:
            # Before images are generated.
            check_tiles(one.pathfinder.side, one.classifier.pattern_block)
        check_training_pixels(one)
        if accuracy is not None and one.sequence.classification_weight == 0:
            raise UserError(
                f"stop_at_accuracy={accuracy:g} cannot be reached by a stage that learns no "
                "labels. Remove stop_at_accuracy, or raise sequence.classification_weight above 0."
            )
    return [
        Stage(number, len(own), one, f"side-{one.pathfinder.side}", entry, accuracy)
        for number, (entry, one, accuracy) in enumerate(own)
    ]


def check_training_pixels(settings: Settings) -> None:
    """Raise UserError where sequence.training_pixels leaves out pixels that
    another setting needs."""
    pixels = settings.sequence.training_pixels
    if pixels is None:
        return
    needs_all = {
        f"masked_pixels.weight={settings.masked_pixels.weight:g}": settings.masked_pixels.weight
        > 0,
        f"classifier.pattern={settings.classifier.pattern}": settings.classifier.pattern != DENSE,
    }
    for given, needs in needs_all.items():
        if needs:
            raise UserError(
                f"sequence.training_pixels={pixels} leaves pixels out, and {given} needs all: "
                "remove one of the two settings."
            )
