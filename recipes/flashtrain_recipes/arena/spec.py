"""task=classification: what it offers a run, and who heeds its settings; mode=preview draws images of Pathfinder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtrain.settings.settings import Settings
from flashtrain.spec import TRAIN, Condition, Loaded, Mode, Prepared, Rule, Task, does, either, task_of, trains

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

    from flashtrain.training.hardware import Hardware


class ClassificationTask(Task):
    """Classifiers of long sequences, in stages (recipe=pathx, path256, lra-*)."""

    groups = ("classifier", "sequence", "masked_pixels", "curriculum", "pathfinder")
    generates = shards = False
    heeds = (*groups, "trainer.cuda_graphs", "export_precision", "weights")

    def in_stages(self, settings: Settings, name: str, otherwise: object) -> list[object]:
        own = [getattr(stage, name) for stage in settings.curriculum.stages] or [None]
        return [otherwise if value is None else value for value in own]

    def check_step(self, settings: Settings, given: Collection[str]) -> None:
        from flashtrain_recipes.arena.stages import check_heeded, stages_of

        check_heeded(settings, set(given))
        stages_of(settings)

    def columns(self, settings: Settings) -> dict[str, Any]:
        from flashtrain_recipes.arena.words import trained_columns

        return trained_columns(settings)

    def trainings(
        self, settings: Settings, hardware: Hardware, folder: Path, overrides: list[str]
    ) -> Iterator[Prepared]:
        from flashtrain_recipes.arena.curriculum import trainings

        return trainings(settings, hardware, folder, overrides)

    def plan(self, settings: Settings, hardware: Hardware) -> str:
        from flashtrain_recipes.arena.words import plan_classifier

        return plan_classifier(settings, hardware)

    def say(self, row: dict[str, Any], folder: Path, settings: Settings) -> None:
        from flashtrain_recipes.arena.words import say_classified

        say_classified(row, folder, settings)

    def run_mode(self, settings: Settings, hardware: Hardware) -> dict[str, Any]:
        from flashtrain_recipes.arena.evaluate import run_classifier_mode

        return run_classifier_mode(settings, hardware)

    def load(self, settings: Settings, hardware: Hardware) -> Loaded:
        from flashtrain_recipes.arena.evaluate import load_classifier

        return load_classifier(settings, hardware)

    def demo_line(self, full: Settings, demo: Settings, where: str) -> str:
        from flashtrain_recipes.arena.words import trained_line

        return (
            f"training the recipe's small demo instead ({trained_line(demo)}). "
            f"For the recipe in full ({trained_line(full)}), {where}"
        )

    def of_checkpoint(self, settings: Settings) -> Settings:
        from flashtrain_recipes.arena.evaluate import of_last_stage

        return of_last_stage(settings)

    def for_weights(self, words: Sequence[str], given: dict[str, Override]) -> Settings | None:
        from flashtrain_recipes.arena.evaluate import settings_for_weights

        return settings_for_weights(words, given)

    def is_carried(self, resume: str) -> bool:
        from flashtrain_recipes.arena.curriculum import is_carried

        return is_carried(resume)


class Preview(Mode):
    """mode=preview (recipe=pathfinder-preview): a picture of some images; no attention is computed."""

    measures = True

    def is_asked(self, settings: Settings) -> bool:
        return settings.pathfinder.preview is not None

    def plan(self, settings: Settings, hardware: Hardware) -> str:
        from flashtrain_recipes.arena.pathfinder.preview import preview_plan

        return preview_plan(settings, hardware)

    def run(
        self, settings: Settings, hardware: Hardware, folder: Path, *, overrides: list[str], started: float
    ) -> dict[str, Any]:
        from flashtrain_recipes.arena.pathfinder.preview import preview

        return preview(settings, hardware, folder, overrides=overrides, started=started)


def _data(*names: str) -> Condition:
    """Whether these are what a classifier reads."""
    return lambda settings: settings.sequence.data in names


def _from_files(settings: Settings) -> bool:
    """Whether Pathfinder's images are read, not drawn."""
    return settings.sequence.data == "pathfinder" and settings.sequence.path is not None


def _sparse(settings: Settings) -> bool:
    return any(
        name != "dense" for name in task_of(settings).in_stages(settings, "pattern", settings.classifier.pattern)
    )


def _masks_pixels(settings: Settings) -> bool:
    return any(
        weight != 0 for weight in task_of(settings).in_stages(settings, "masked_weight", settings.masked_pixels.weight)
    )


def _reads_pathfinder(settings: Settings) -> bool:
    return does(TRAIN, "evaluate", task="classifier")(settings) and settings.sequence.data == "pathfinder"


RULES = (
    Rule("sequence", does(TRAIN, "evaluate", task="classifier"), "classifiers (recipe=pathx, path256, lra-*)"),
    Rule(
        "sequence.augment sequence.classification_weight sequence.validation_samples",
        trains("classifier"),
        "trainings of a classifier",
    ),
    Rule(
        "sequence.path",
        _data("text", "retrieval", "image", "pathfinder"),
        "sequence.data=pathfinder, text, retrieval, image; listops is generated",
    ),
    Rule(
        "sequence.name",
        either(_data("text", "image"), _from_files),
        "sequence.data=text, image, and Pathfinder's images from sequence.path",
    ),
    Rule(
        "sequence.seed",
        either(_data("listops", "text", "image"), _from_files),
        "sequence.data=listops, text, image; Pathfinder has pathfinder.seed",
    ),
    Rule(
        "pathfinder",
        either(does("preview"), _reads_pathfinder),
        "classifiers of sequence.data=pathfinder, and recipe=pathfinder-preview",
    ),
    Rule(
        "pathfinder.seed pathfinder.train_images pathfinder.validation_images "
        "pathfinder.test_images pathfinder.workers pathfinder.cache_dir",
        lambda settings: not _from_files(settings),
        "images that are drawn; those of sequence.path have sequence.seed, sequence.validation and sequence.test",
    ),
    Rule("pathfinder.preview", does("preview"), "recipe=pathfinder-preview"),
    Rule(
        "pathfinder.train_images pathfinder.validation_images pathfinder.variation",
        trains("classifier"),
        "trainings of a classifier",
    ),
    # a training keeps it for the mode=evaluate of its run
    Rule("pathfinder.test_images", does(TRAIN, "evaluate"), "mode=evaluate of a classifier"),
    Rule(
        "classifier masked_pixels curriculum",
        trains("classifier"),
        "trainings of a classifier (recipe=pathx, path256, lra-*)",
    ),
    Rule(
        "classifier.pattern_block classifier.pattern_local classifier.pattern_globals",
        _sparse,
        "classifier.pattern other than dense",
    ),
    Rule("masked_pixels.share masked_pixels.copies", _masks_pixels, "masked_pixels.weight above 0"),
)
