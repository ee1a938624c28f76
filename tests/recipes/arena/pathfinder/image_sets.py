"""The type of the fixture images_of."""

from typing import Protocol

from flashtrain_recipes.arena.pathfinder.store import PathfinderImages


class ImagesOf(Protocol):
    """(side, contour, count) -> the first images of seed 7."""

    def __call__(self, side: int, contour: str, count: int) -> PathfinderImages: ...
