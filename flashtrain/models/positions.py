"""Where a token stands: learned vectors, or rotary angles of queries and keys, in a row or along an image's two axes.

All can serve a longer context than they were trained with: rotary_base_for raises the base of the angles, stretched and
grown_grid interpolate a learned table.

Shapes: B batch, S sequence (pixels in raster order), N heads (query and key heads may be stacked), D head dimension,
E embedding width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError, above, at_least


class RotaryPositions(nn.Module):
    """Rotary positions (Su et al. 2021, RoFormer): turns the pairs (i, i + D/2) of a head by position * base^(-2i/D).

    The angles are computed from the positions in every forward, in float32 at least (float64 for float64 inputs): there
    is no table to be rounded when the model is cast to bfloat16, and no longest position. Whole turns are taken off in
    float64: the float32 product of a position near a million and a frequency would be wrong by 0.03 radians.
    """

    def __init__(self, head_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        check_rotary(head_dim, base)
        self.head_dim = head_dim
        self.base = base

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, S, N, D) floating; positions (B, S) or (1, S), any integer dtype. Returns x rotated, same dtype."""
        precise = torch.promote_types(x.dtype, torch.float32)
        exponent = torch.arange(0, self.head_dim, 2, device=x.device, dtype=precise) / self.head_dim
        turns = positions.double()[:, :, None, None] * ((self.base**-exponent).double() * (1 / math.tau))
        return turned(x, turns)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, base={self.base:g}"


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """The pairs (i, i + D/2) of x (B, S, N, D) rotated by `turns` (B or 1, S, 1, D/2) float64 full turns; x's dtype."""
    precise = torch.promote_types(x.dtype, torch.float32)
    angle = (turns - turns.floor()).to(precise) * math.tau
    cos, sin = angle.cos(), angle.sin()
    first, second = x.to(precise).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class LearnedPositions(nn.Embedding):
    """One learned vector for each position 0 .. context-1 (GPT-2, BERT)."""

    def __init__(self, context: int, embed: int) -> None:
        super().__init__(context, embed)

    def forward(self, positions: Tensor, *, packed: bool = False) -> Tensor:
        """positions (B, S) or (1, S), int32 or int64. Returns (B or 1, S, E). UserError: past the trained context.

        Values are looked at only on the CPU outside torch.compile (elsewhere that would stall the device); the length S
        is checked always, except of packed rows, whose sequences are each shorter.
        """
        context = self.num_embeddings
        longest = 0 if packed else positions.shape[1]
        if positions.device.type == "cpu" and not torch.compiler.is_compiling() and positions.numel():
            longest = max(longest, int(positions.max()) + 1)
        check_learned(longest, context)
        return super().forward(positions)


def rotary_base_for(base: float, factor: float, head_dim: int) -> float:
    """The rotary base that serves a context `factor` times as long as the one `base` was trained with.

    base * factor^(D / (D - 2)), the "NTK-aware" scaling posted by bloc97 in June 2023 and written down in Peng et al.
    2023 (YaRN, section 3.1): the slowest pair turns `factor` times slower, so that the longest distance turns it no
    further than in training, while the fastest pair, which tells neighbours apart, turns as before.
    UserError: a factor below 1.
    """
    at_least("rope_factor", factor, 1)
    return base if factor == 1 else base * factor ** (head_dim / (head_dim - 2))


def stretched(table: Tensor, context: int) -> Tensor:
    """A learned position table (C, E) interpolated linearly to (context, E), in its own dtype.

    The first and last rows stay what they were and the new ones lie evenly between, so that position p of the long
    context takes the place (C - 1) / (context - 1) * p of the trained one; no row is made up outside of what was
    trained. For transformers on images this is Dosovitskiy et al. 2021 (section 3.2); for language models with rotary
    positions, Chen et al. 2023 ("Position Interpolation"). The model has to be trained on for it to serve.
    """
    rows = table.shape[0]
    if rows == 1 or context == 1:
        return table[:1].expand(context, -1).clone()
    place = torch.arange(context, dtype=torch.float64, device=table.device) * ((rows - 1) / (context - 1))
    before = place.floor().long().clamp(max=rows - 2)
    share = (place - before)[:, None]
    precise = table.to(torch.promote_types(table.dtype, torch.float32))
    return torch.lerp(precise[before], precise[before + 1], share.to(precise.dtype)).to(table.dtype)


def check_learned(length: int, context: int) -> None:
    """UserError when a sequence of that length runs past a learned position table of `context` rows."""
    if length > context:
        raise UserError(
            f"{length} positions for a model with {context} learned ones. "
            f"Possible: at most {context} tokens, or a model built with a longer context or positions=rotary."
        )


def check_rotary(head_dim: int, base: float) -> None:
    """UserError when heads of that size cannot be rotated in pairs, or the base is no base."""
    if head_dim % 2:
        raise UserError(f"head dimension {head_dim} with rotary positions: expected an even one.")
    above("rope_base", base, 1)


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
    """
    trained = math.isqrt(table.shape[0])
    place = torch.arange(side, device=table.device) * trained // side
    grid = table.view(trained, trained, -1)
    return grid[place][:, place].reshape(side * side, -1)


def check_axial(head_dim: int, base: float) -> None:
    """UserError when heads of that size cannot be rotated by row and column, or the base is no base."""
    if head_dim % 4:
        raise UserError(f"head dimension {head_dim} with axial positions: expected a multiple of 4.")
    above("rope_base", base, 1)
