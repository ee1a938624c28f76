"""Stored sets of images as tests ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from flashtrain_recipes.arena.pathfinder.raster import rasterise
from flashtrain_recipes.arena.pathfinder.store import PathfinderImages


class ImagesOf(Protocol):
    """The fixture images_of: (side, contour, count) -> the first images of seed 7."""

    def __call__(self, side: int, contour: str, count: int) -> PathfinderImages: ...


def margins(images: PathfinderImages) -> np.ndarray:
    """The free space around the dashes of each image, in pixels, (images,) uint8."""
    return images._records["margin"]


def drawn(
    images: PathfinderImages,
    numbers: Sequence[int] | slice = slice(None),
    device: str = "cpu",
    **options: Tensor,
) -> Tensor:
    """Images of a set, (B, side, side), drawn on the device."""
    strokes = images.strokes(numbers)
    return rasterise(
        strokes["windows"].to(device), strokes["markers"].to(device), images.parameters, **options
    )
