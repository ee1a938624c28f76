"""Drawing a batch of Pathfinder images as pathfinder.drawing says."""

from __future__ import annotations

from torch import Tensor

from flashtrain.data.pathfinder import raster as smooth
from flashtrain.data.pathfinder.original import raster as original
from flashtrain.data.pathfinder.parameters import ORIGINAL, PathfinderParameters, arena_contrasts
from flashtrain.data.pathfinder.strokes import Strokes


def rasterise(strokes: Strokes, parameters: PathfinderParameters, drawing: str, drawn_as: int | None = None) -> Tensor:
    """(B, side, side) uint8, [row, column], on the strokes' device. Strokes of drawing=original may be drawn smooth.

    drawn_as: the side whose brightness they have, as `parameters` already have its sizes (None: their own).
    """
    if drawing == ORIGINAL:
        return original.rasterise(strokes, parameters, arena_contrasts(drawn_as or parameters.side))
    return smooth.rasterise(strokes, parameters)
