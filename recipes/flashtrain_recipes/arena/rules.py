"""Who heeds the settings of classifiers: `sequence.*`, `pathfinder.*`, `classifier.*`, `masked_pixels.*`."""

from __future__ import annotations

from flashtrain.heeded import TRAIN, Condition, Rule, does, either, trains
from flashtrain.settings.settings import Settings
from flashtrain.spec import task_of


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
        "sequence.cache_dir",
        _data("listops", "text", "retrieval", "image"),
        "data other than Pathfinder's, which have pathfinder.cache_dir",
    ),
    Rule(
        "pathfinder",
        either(does("preview"), _reads_pathfinder),
        "classifiers of sequence.data=pathfinder, and recipe=pathfinder-preview",
    ),
    Rule(
        "pathfinder.drawing pathfinder.seed pathfinder.drawn_as pathfinder.train_images pathfinder.validation_images "
        "pathfinder.test_images pathfinder.workers pathfinder.cache_dir",
        lambda settings: not _from_files(settings),
        "images that are drawn; those of sequence.path have sequence.seed, sequence.validation and sequence.test",
    ),
    Rule("pathfinder.preview", does("preview"), "recipe=pathfinder-preview; mode=evaluate has sequence.preview"),
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
