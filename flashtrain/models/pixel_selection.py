"""Random selections of an image's pixels: those to mask, and those to read.

Shapes: B images, S pixels of an image in raster order, M selected pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

DARK = 8  # the brightest grey level of the background and of most of a shape's faint ring, which training may leave out


def pixels_to_mask(
    rows: int, length: int, share: float, generator: torch.Generator, lengths: Tensor | None = None
) -> Tensor:
    """Select a random share of the pixels of each row, at least one.

    Args:
        rows: Number of rows.
        length: S.
        share: Of the pixels, or of a padded row's own length.
        generator: The result is on its device.
        lengths: (rows,) real tokens of padded rows (None: no padding).

    Returns:
        (rows, M) int64, ascending, where M is round(share * S); after fewer selected pixels -1.
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
    """Select random pixels of each image, those above DARK first.

    Args:
        levels: Grey levels, (B, S).
        count: M.
        generator: On the images' device.

    Returns:
        (B, M) int64, ascending.
    """
    drawn = torch.rand(levels.shape, generator=generator, device=levels.device)
    return (drawn + (levels > DARK)).topk(count, dim=1).indices.sort(dim=1).values
