"""Random flips and rotations of a task's training images that do not change their labels.

B images, S = side * side pixels in raster order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashtrain.tasks.classification import Augment


def turned_and_mirrored(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Turn each image (B, S) into a random one of its eight rotations and reflections,
    as suits drawn shapes."""
    images = _square(pixels)
    across, down, over = torch.randint(
        2, (3, len(images), 1, 1), generator=generator, device=pixels.device
    ).bool()
    images = torch.where(across, images.flip(2), images)
    images = torch.where(down, images.flip(1), images)
    return torch.where(over, images.transpose(1, 2), images).flatten(1)


def mirrored(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Exchange left and right of each image (B, S) with probability 1/2, as suits
    photographs; return all."""
    images = _square(pixels)
    across = torch.randint(2, (len(images), 1, 1), generator=generator, device=pixels.device).bool()
    return torch.where(across, images.flip(2), images).flatten(1)


def _square(pixels: Tensor) -> Tensor:
    side = math.isqrt(pixels.shape[1])
    return pixels.view(-1, side, side)


BY_NAME: dict[str, tuple[Augment, ...]] = {
    "none": (),
    "turn": (turned_and_mirrored,),
    "mirror": (mirrored,),
}
