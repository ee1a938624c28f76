"""The type of the fixture images_of."""

from collections.abc import Callable

from flashtrain.data.pathfinder.store import PathfinderImages

# (side, contour, count) -> the first images of seed 7
ImagesOf = Callable[[int, str, int], PathfinderImages]
