"""Drawing a batch of Pathfinder images as pathfinder.drawing says."""

from __future__ import annotations

from torch import Tensor

from flashtrain.data.pathfinder import raster as smooth
from flashtrain.data.pathfinder.original import raster as original
from flashtrain.data.pathfinder.parameters import ORIGINAL, PathfinderParameters
from flashtrain.data.pathfinder.strokes import Strokes


def rasterise(strokes: Strokes, parameters: PathfinderParameters, drawing: str) -> Tensor:
    """(B, side, side) uint8, [row, column], on the strokes' device. Strokes of drawing=original may be drawn smooth."""
    draw = original.rasterise if drawing == ORIGINAL else smooth.rasterise
    return draw(strokes, parameters)
