"""The settings `pathfinder.*`: which images, how many, and what is drawn by recipe=pathfinder-preview."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flashtrain.errors import UserError
from flashtrain.settings.setting_checks import at_least, one_of
from flashtrain_recipes.arena.pathfinder.parameters import BOTH, DRAWINGS, ORIGINAL, SMALLEST_SIDE, SMOOTH, of_side


@dataclass
class PathfinderSettings:
    """side: of the square images; 32, 64, 128 (Path-X) and 256 (Path-256) are the Long Range Arena's, any other goes.

    contour: hard (14 dashes, the Arena's), intermediate (9), easy (6), a number of dashes, or a range such as 3-6, of
    which every length has as many images. drawing: original (the images of the task's own program, pixel by pixel) or
    smooth (of a generator of our own, as all images were before there was a choice: round ends, even brightness, no
    halo, other curves); both in mode=evaluate, for a row each. drawn_as: another side, whose discs, lines and
    brightness these images have (None: their own): what a curriculum changes before it changes the side.
    variation: how much the drawing of each training image is changed at random, from 0 (not at all) to 1
    (variation.py); images that are validated or tested on never are. seed: of the images; train, validation and test
    images are different ones.
    train_images, validation_images, test_images: how many. workers: processes that generate (None: one a core).
    cache_dir: where generated sets are kept (None: FLASHTRAIN_CACHE).
    preview: images that recipe=pathfinder-preview draws (None, of the other recipes: 24 with mode=preview).
    """

    # What a run's config.yaml means that does not name these: there was one drawing.
    OF_EARLIER_RUNS: ClassVar[dict[str, Any]] = {"drawing": SMOOTH}

    side: int = 32
    contour: str = "hard"
    drawing: str = ORIGINAL
    drawn_as: int | None = None
    variation: float = 0.0
    seed: int = 0
    train_images: int = 160_000
    validation_images: int = 20_000
    test_images: int = 20_000
    workers: int | None = None
    cache_dir: str | None = None
    preview: int | None = None

    def check(self) -> None:
        """Raise UserError for the first setting that cannot work."""
        at_least("pathfinder.side", self.side, SMALLEST_SIDE)
        of_side(self.side, self.contour)
        one_of("pathfinder.drawing", self.drawing, (*DRAWINGS, BOTH))
        if self.drawn_as is not None:
            at_least("pathfinder.drawn_as", self.drawn_as, SMALLEST_SIDE)
        if not 0 <= self.variation <= 1:
            raise UserError(f"pathfinder.variation={self.variation:g}. Possible: from 0 (none) to 1.")
        at_least("pathfinder.seed", self.seed, 0)
        for name in ("train_images", "validation_images", "test_images", "preview"):
            if getattr(self, name) is not None:
                at_least(f"pathfinder.{name}", getattr(self, name), 1)
        if self.workers is not None:
            at_least("pathfinder.workers", self.workers, 1)
