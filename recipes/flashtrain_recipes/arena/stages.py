"""What each stage of a training is: the run's settings with the stage's own in their place."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import TypeVar

from flashtrain.errors import UserError
from flashtrain.models.classifier_config import DENSE, TILED, check_tiles
from flashtrain.registry import component
from flashtrain.settings.settings import Settings, divisors
from flashtrain.tasks import components  # noqa: F401 - they register the schedules that stages name
from flashtrain_recipes.arena.pathfinder.parameters import contour_words
from flashtrain_recipes.arena.settings import StageSettings

T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """number: from 0, of `count`. settings: the run's, changed to train this stage alone. until: the held-out accuracy
    that ends it early, None for none."""

    number: int
    count: int
    settings: Settings
    until: float | None = None

    @property
    def name(self) -> str:
        """Such as "stage 2 of 3, side 64, hard contours"; "side 64" or the data's name where there is one only."""
        sequence, images = self.settings.sequence, self.settings.pathfinder
        what = f"side {images.side}" if sequence.data == "pathfinder" else sequence.data
        if self.count == 1:
            return what
        return f"stage {self.number + 1} of {self.count}, {what}, {contour_words(images.contour)}"

    @property
    def folder(self) -> str:
        """The name of the stage's folder in the run's; "" for a single stage, which needs none."""
        return "" if self.count == 1 else f"stage-{self.number + 1}-side-{self.settings.pathfinder.side}"

    @property
    def steps(self) -> int:
        """Optimiser steps, at most."""
        return self.settings.trainer.steps

    @property
    def batch(self) -> int:
        """Samples of an optimiser step, over all devices."""
        return self.settings.sequence.batch

    @property
    def samples(self) -> int:
        """Samples that the whole stage reads, at most."""
        return self.steps * self.batch


def stages_of(settings: Settings) -> list[Stage]:
    """The stages to train, one at least. Raises UserError for settings that do not go together."""
    given = settings.curriculum.each_stage()
    if given and settings.sequence.data != "pathfinder":
        raise UserError(
            f"curriculum.stages are of growing images: sequence.data={settings.sequence.data} has none, "
            "only pathfinder has."
        )
    changed = [(_changed(settings, stage), stage.until) for stage in given] or [(settings, None)]
    for one, until in changed:
        check_batch(one)
        if one.sequence.data == "pathfinder" and one.classifier.pattern in TILED:
            check_tiles(one.pathfinder.side, one.classifier.pattern_block)  # before images are generated
        check_training_pixels(one)
        component("schedule", one.schedule.name)
        if until is not None and one.sequence.classification_weight == 0:
            raise UserError(f"a stage that learns no labels never gets until={until:g} of them right: leave it out.")
    return [Stage(number, len(changed), one, until) for number, (one, until) in enumerate(changed)]


# Settings of a run, and what of a stage stands in their place; a stage always says its side.
SAID_BY_STAGES = {
    "trainer.steps": ("steps", "epochs"),
    "trainer.micro_batch": ("micro_batch",),
    "trainer.validate_every": ("validate_every",),
    "trainer.compile": ("compile",),
    "optimizer.learning_rate": ("learning_rate",),
    "schedule.name": ("schedule",),
    "schedule.warmup_steps": ("warmup_steps",),
    "sequence.batch": ("batch",),
    "sequence.classification_weight": ("classification_weight",),
    "sequence.training_pixels": ("training_pixels",),
    "masked_pixels.weight": ("masked_weight",),
    "classifier.pattern": ("pattern",),
    "pathfinder.side": ("side",),
    "pathfinder.contour": ("contour",),
    "pathfinder.train_images": ("images",),
}


def check_heeded(settings: Settings, given: Set[str]) -> None:
    """Raise UserError for a setting of the command line (`given`: their names) that every stage of the recipe says
    anew. Whoever gives stages too knows what they say."""
    stages = settings.curriculum.stages
    if not stages or "curriculum.stages" in given:
        return
    for name in sorted(SAID_BY_STAGES.keys() & given):
        of_stage = SAID_BY_STAGES[name]
        if all(any(getattr(one, key) is not None for key in of_stage) for one in stages):
            raise UserError(
                f"{name} changes nothing: each of curriculum.stages has its own {' or '.join(of_stage)}. Possible: "
                "curriculum.stages=[] for one stage as the other settings say, or stages of your own."
            )


def check_batch(settings: Settings) -> None:
    """Raise UserError unless the samples of a step divide over devices and micro-batches."""
    batch, ranks = settings.sequence.batch, settings.trainer.ranks
    if batch % ranks:
        raise UserError(f"a step of sequence.batch={batch} samples does not divide over {ranks} devices.")
    micro = settings.trainer.micro_batch
    if micro is not None and (batch // ranks) % micro:
        raise UserError(
            f"trainer.micro_batch={micro} does not divide the {batch // ranks} samples a device takes a step: "
            f"choose one of {', '.join(map(str, divisors(batch // ranks)))}."
        )


def check_training_pixels(settings: Settings) -> None:
    """Raise UserError where only some pixels are read of what needs all."""
    asked = settings.sequence.training_pixels
    if asked is None:
        return
    needs_all = {
        f"masked_pixels.weight={settings.masked_pixels.weight:g}": settings.masked_pixels.weight > 0,
        f"classifier.pattern={settings.classifier.pattern}": settings.classifier.pattern != DENSE,
    }
    for given, needs in needs_all.items():
        if needs:
            raise UserError(f"sequence.training_pixels={asked} leaves pixels out, and {given} needs all: drop one.")


def _own(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value


def _changed(settings: Settings, stage: StageSettings) -> Settings:
    """The run's settings with a stage's in place."""

    batch = stage.batch or settings.sequence.batch
    images = stage.images or settings.pathfinder.train_images
    steps = stage.steps or settings.trainer.steps
    if stage.epochs is not None:
        steps = max(1, math.ceil(stage.epochs * images / batch))
    return settings.having(
        trainer=replace(
            settings.trainer,
            steps=steps,
            micro_batch=stage.micro_batch or settings.trainer.micro_batch,
            validate_every=_own(stage.validate_every, settings.trainer.validate_every),
            compile=_own(stage.compile, settings.trainer.compile),
        ),
        optimizer=replace(
            settings.optimizer, learning_rate=_own(stage.learning_rate, settings.optimizer.learning_rate)
        ),
        schedule=replace(
            settings.schedule,
            name=_own(stage.schedule, settings.schedule.name),
            warmup_steps=_own(stage.warmup_steps, settings.schedule.warmup_steps),
        ),
        sequence=replace(
            settings.sequence,
            batch=batch,
            classification_weight=_own(stage.classification_weight, settings.sequence.classification_weight),
            training_pixels=_own(stage.training_pixels, settings.sequence.training_pixels),
        ),
        masked_pixels=replace(settings.masked_pixels, weight=_own(stage.masked_weight, settings.masked_pixels.weight)),
        classifier=replace(settings.classifier, pattern=_own(stage.pattern, settings.classifier.pattern)),
        pathfinder=replace(
            settings.pathfinder,
            side=stage.side,
            contour=stage.contour or settings.pathfinder.contour,
            train_images=images,
        ),
    )
