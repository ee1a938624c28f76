"""Images turned and mirrored while training. It changes which images are seen, and nothing of the model.

B images, S = side * side pixels in raster order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashtrain.errors import unknown

Augment = Callable[[Tensor, torch.Generator], Tensor]


def turned_and_mirrored(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Each image (B, S) in one of the square's eight positions, drawn at random: a label that belongs to shapes, such
    as Pathfinder's, stays what it was."""
    images = _square(pixels)
    across, down, over = torch.randint(2, (3, len(images), 1, 1), generator=generator, device=pixels.device).bool()
    images = torch.where(across, images.flip(2), images)
    images = torch.where(down, images.flip(1), images)
    return torch.where(over, images.transpose(1, 2), images).flatten(1)


def mirrored(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Each image (B, S) as it is, or left and right exchanged, as photographs of things may be."""
    images = _square(pixels)
    across = torch.randint(2, (len(images), 1, 1), generator=generator, device=pixels.device).bool()
    return torch.where(across, images.flip(2), images).flatten(1)


AUGMENTATIONS: dict[str, Augment] = {"turn": turned_and_mirrored, "mirror": mirrored}


def augmentation(name: str) -> Augment | None:
    """The augmentation of that name, None for "none". UserError: no such name."""
    if name == "none":
        return None
    if name not in AUGMENTATIONS:
        raise unknown("augmentation", name, ("none", *AUGMENTATIONS))
    return AUGMENTATIONS[name]


def in_turn(several: Sequence[Augment]) -> Augment | None:
    """One augmentation after the other, as one; None for none."""
    if len(several) < 2:
        return several[0] if several else None

    def augment(pixels: Tensor, generator: torch.Generator) -> Tensor:
        for one in several:
            pixels = one(pixels, generator)
        return pixels

    return augment


def _square(pixels: Tensor) -> Tensor:
    side = math.isqrt(pixels.shape[1])
    return pixels.view(-1, side, side)
