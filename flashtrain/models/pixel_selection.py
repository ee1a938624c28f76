"""Random selections of an image's pixels: those to mask, and those to read.

Shapes: B images, S pixels of an image in raster order, M selected pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The brightest grey level of the background and of most of a shape's faint ring, which
# training may leave out.
DARK = 8


def pixels_to_mask(
    rows: int, length: int, share: float, generator: torch.Generator, lengths: Tensor | None = None
) -> Tensor:
    """Select a random share of the pixels of each row, at least one.

    Args:
        rows: The number of rows.
        length: The length of a row, S.
        share: The share of a row's pixels to select, without its padding.
        generator: The random generator; the result is on its device.
        lengths: (rows,) numbers of real tokens in padded rows (None: no padding).

    Returns:
        (rows, M) int64, ascending indices, where M is round(share * S); -1 fills rows with
        fewer selected pixels.
    """
    count = min(length, max(1, round(share * length)))
    drawn = torch.rand((rows, length), generator=generator, device=generator.device)
    if lengths is None:
        return drawn.topk(count, dim=1).indices.sort(dim=1).values
    padding = torch.arange(length, device=drawn.device) >= lengths[:, None]
    places = drawn.masked_fill(padding, -1.0).topk(count, dim=1).indices
    wanted = (share * lengths).round().clamp(min=1)
    unwanted = torch.arange(count, device=drawn.device) >= wanted[:, None]
    places = places.masked_fill(unwanted, length).sort(dim=1).values
    return places.masked_fill(places == length, -1)


def pixels_to_read(levels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Select random pixels of each image, those brighter than the grey level DARK first.

    Args:
        levels: Grey levels, (B, S).
        count: The number of pixels to select, M.
        generator: The random generator, on the images' device.

    Returns:
        (B, M) int64, ascending raster numbers.
    """
    drawn = torch.rand(levels.shape, generator=generator, device=levels.device)
    return (drawn + (levels > DARK)).topk(count, dim=1).indices.sort(dim=1).values
