"""Where a pixel stands in a square image: axial rotary positions, and learned ones carried to a larger image.

Shapes: B batch, S sequence (pixels in raster order), N heads (query and key heads may be stacked), D head dimension,
E embedding width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.models.positions import turned

# The slowest pair of a head of 64 then turns once in 2 pi 100^(15/16) = 471 pixels: no two pixels of an image of side
# 256 look alike to it, and no pair is so slow that it tells nothing.
AXIAL_BASE = 100.0


class AxialRotaryPositions(nn.Module):
    """Rotary positions in two dimensions, in units of pixels: the first half of a head's pairs turns by the row, the
    second half by the column.

    Pair j of the D/4 of an axis turns by coordinate * base^(-4j/D). Because the unit is the pixel and not the share of
    the image, what is learned of near pixels holds in an image of any side: that is what a curriculum of growing images
    rests on. Rotary positions: Su et al. 2021; by axis for images: Heo et al. 2024 (arXiv 2403.13298).

    side: pixels of a row. UserError: a head dimension that is no multiple of 4, a base that is no base.
    """

    def __init__(self, head_dim: int, side: int, base: float = AXIAL_BASE) -> None:
        super().__init__()
        check_axial(head_dim, base)
        if side < 1:
            raise UserError(f"side {side}. Possible: 1 or more pixels.")
        self.head_dim, self.side, self.base = head_dim, side, base

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, S, N, D) floating; positions (B, S) or (1, S), pixel numbers in raster order. Returns x rotated."""
        exponent = torch.arange(0, self.head_dim, 4, device=x.device, dtype=torch.float64) / self.head_dim
        frequency = self.base**-exponent * (1 / math.tau)
        rows = torch.div(positions, self.side, rounding_mode="floor").double()
        columns = torch.remainder(positions, self.side).double()
        turns = torch.cat((rows[..., None] * frequency, columns[..., None] * frequency), dim=-1)
        return turned(x, turns[:, :, None, :])

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, side={self.side}, base={self.base:g}"


def grown_grid(table: Tensor, side: int) -> Tensor:
    """A learned position table of a square image, (s * s, E), for one of another side: (side * side, E).

    A pixel takes the vector of the trained pixel at the same place of the image, so that each is copied to a square of
    neighbours where the side doubles (grid-wise, as Dao et al. 2022 did it for their larger images).
    UserError: a table of no square.
    """
    trained = math.isqrt(table.shape[0])
    if trained * trained != table.shape[0]:
        raise UserError(f"{table.shape[0]} learned positions are no square image's. Possible: a square number.")
    place = torch.arange(side, device=table.device) * trained // side
    grid = table.view(trained, trained, -1)
    return grid[place][:, place].reshape(side * side, -1)


def check_axial(head_dim: int, base: float) -> None:
    """UserError when heads of that size cannot be rotated by row and column, or the base is no base."""
    if head_dim % 4:
        raise UserError(f"head dimension {head_dim} with axial positions. Possible: a multiple of 4.")
    if base <= 1:
        raise UserError(f"rope_base {base:g}. Possible: a number above 1 ({AXIAL_BASE:g} is usual for pixels).")
