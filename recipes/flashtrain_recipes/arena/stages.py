"""The stages of a training; each has the run's settings, changed by its entry in
curriculum.stages."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

from flashtrain.errors import UserError
from flashtrain.models.block_pattern import DENSE, TILED, check_tiles
from flashtrain.registry import component
from flashtrain.settings.settings import Settings
from flashtrain.tasks import optimization  # noqa: F401 - it registers the schedules that stages name
from flashtrain_recipes.arena.pathfinder.parameters import contour_words
from flashtrain_recipes.arena.settings import StageSettings

# {a stage's setting: the run's setting that it replaces}.
OF_STAGES = {
    "side": "pathfinder.side",
    "contour": "pathfinder.contour",
    "images": "pathfinder.train_images",
    "steps": "trainer.steps",
    "micro_batch": "trainer.micro_batch",
    "validate_every": "trainer.validate_every",
    "compile": "trainer.compile",
    "learning_rate": "optimizer.learning_rate",
    "schedule": "schedule.name",
    "warmup_steps": "schedule.warmup_steps",
    "batch": "sequence.batch",
    "training_pixels": "sequence.training_pixels",
    "masked_weight": "masked_pixels.weight",
    "pattern": "classifier.pattern",
}


@dataclass(frozen=True)
class Stage:
    """One stage of a curriculum: its number, its settings, and the accuracy that ends it early."""

    number: int  # from 0
    count: int  # of all stages
    entry: int  # index of its entry in curriculum.stages
    settings: Settings  # the run's, changed to train this stage alone
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
    def folder(self) -> str:
        """The name of the stage's folder inside the run's; "" for a single
        stage, which has none."""
        return (
            ""
            if self.count == 1
            else f"stage-{self.number + 1}-side-{self.settings.pathfinder.side}"
        )

    @property
    def steps(self) -> int:
        """The most optimizer steps of the stage."""
        return self.settings.trainer.steps

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
    changed = [
        (entry, _changed(settings, one), stage.stop_at_accuracy)
        for entry, stage in enumerate(given)
        for one in stage.each_stage()
    ] or [(0, settings, None)]
    for _, one, accuracy in changed:
        one.check_share("sequence.batch", one.sequence.batch)
        if one.sequence.data == "pathfinder" and one.classifier.pattern in TILED:
            # Before images are generated.
            check_tiles(one.pathfinder.side, one.classifier.pattern_block)
        check_training_pixels(one)
        component("schedule", one.schedule.name)
        if accuracy is not None and one.sequence.classification_weight == 0:
            raise UserError(
                f"stop_at_accuracy={accuracy:g} cannot be reached by a stage that learns no "
                "labels. Remove stop_at_accuracy, or raise sequence.classification_weight above 0."
            )
    return [
        Stage(number, len(changed), entry, one, accuracy)
        for number, (entry, one, accuracy) in enumerate(changed)
    ]


def check_used_by_stages(settings: Settings, given: Set[str]) -> None:
    """Raise UserError for a setting of the command line that changes nothing, since each entry
    of curriculum.stages sets its own value.

    Args:
        given: names of the settings on the command line.
    """
    stages = settings.curriculum.stages
    if not stages or "curriculum.stages" in given:
        return
    for key, name in OF_STAGES.items():
        if name in given and all(getattr(stage, key) is not None for stage in stages):
            raise UserError(
                f"{name} changes nothing: each of curriculum.stages has its own {key}. Change it "
                "there, or use curriculum.stages=[] to train a single stage by the other settings."
            )


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


def _changed(settings: Settings, stage: StageSettings) -> Settings:
    own: dict[str, dict[str, Any]] = {}
    for key, name in OF_STAGES.items():
        value = getattr(stage, key)
        if value is not None:
            group, field = name.split(".")
            own.setdefault(group, {})[field] = value
    return settings.having(
        **{group: replace(getattr(settings, group), **values) for group, values in own.items()}
    )
