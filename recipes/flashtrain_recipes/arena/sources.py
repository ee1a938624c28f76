"""The source of samples that the setting sequence.data names."""

from __future__ import annotations

from flashtrain.data.sequences import SequenceSource
from flashtrain.settings.settings import Settings
from flashtrain_recipes.arena.image import GreyImages
from flashtrain_recipes.arena.listops import COUNTS, MAX_LENGTH, ListOps
from flashtrain_recipes.arena.papers import PaperPairs
from flashtrain_recipes.arena.pathfinder.image_files import PathfinderFiles
from flashtrain_recipes.arena.pathfinder.source import Pathfinder
from flashtrain_recipes.arena.reviews import Reviews


def make_sequence_source(
    settings: Settings, *, fixed: bool, splits: tuple[str, ...] = ("train", "validation")
) -> SequenceSource:
    """Return the source of a stage's samples.

    Args:
        fixed: whether all batches are padded to one shape.
        splits: the splits that will be read; Pathfinder's images are generated for these only.
    """
    given, images = settings.sequence, settings.pathfinder
    if given.data == "listops":
        longest = given.length or MAX_LENGTH
        counts = {name: getattr(given, name) or count for name, count in COUNTS.items()}
        return ListOps(
            given.seed, counts=counts, shortest=longest // 4, longest=longest, fixed=fixed
        )
    if given.data == "retrieval":
        return PaperPairs(given.path, length=given.length, fixed=fixed)
    if given.data == "text":
        return Reviews(
            given.path,
            given.name,
            length=given.length,
            validation=given.validation,
            seed=given.seed,
            fixed=fixed,
        )
    if given.data == "image":
        return GreyImages(given.path, given.name, validation=given.validation, seed=given.seed)
    if given.path is not None:
        held_out = {"validation": given.validation, "test": given.test}
        return PathfinderFiles(
            given.path, images.side, contour=images.contour, seed=given.seed, **held_out
        )
    return Pathfinder(
        images.side,
        images.seed,
        counts={name: getattr(images, f"{name}_images") for name in splits},
        contour=images.contour,
        variation=images.variation,
        cache_dir=images.cache_dir,
    )
