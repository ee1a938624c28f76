"""Drawing a batch of Pathfinder images as pathfinder.drawing says."""

from __future__ import annotations

from torch import Tensor

from flashtrain_recipes.arena.pathfinder import raster as smooth
from flashtrain_recipes.arena.pathfinder.original import raster as original
from flashtrain_recipes.arena.pathfinder.parameters import ORIGINAL, PathfinderParameters, arena_contrasts
from flashtrain_recipes.arena.pathfinder.strokes import Strokes


def rasterise(
    strokes: Strokes,
    parameters: PathfinderParameters,
    drawing: str,
    drawn_as: int | None = None,
    brightness: Tensor | None = None,
) -> Tensor:
    """(B, side, side) uint8, [row, column], on the strokes' device. Strokes of drawing=original may be drawn smooth.

    drawn_as: the side whose brightness they have, as `parameters` already have its sizes (None: their own).
    brightness: (B, 2) float32, of drawing=original, by how much brighter than they are the dashes of each image's long
    curves are, and those of its short ones (None: as they are).
    """
    if drawing == ORIGINAL:
        contrasts = arena_contrasts(drawn_as or parameters.side)
        if brightness is not None:
            return original.rasterise_in_contrasts(strokes, parameters, brightness * brightness.new_tensor(contrasts))
        return original.rasterise(strokes, parameters, contrasts)
    return smooth.rasterise(strokes, parameters)
