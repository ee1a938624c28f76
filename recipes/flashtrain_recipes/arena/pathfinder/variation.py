"""pathfinder.variation: training images changed a little at random, their curves where they were.

A model is to learn curves, not one program's pens. The changes are of grey levels, and not of where curves lie: half of
the images are shifted, thickened or thinned, made brighter or darker, and their faint ring (halo) is strengthened or
wiped out. The other half stay as they are. Before that, in half of the images the dashes of long curves and those of
short ones are drawn brighter or darker, each by a factor.

B images, S = side * side pixels in raster order.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flashtrain.data.keyed_random import uniform

MOST_SHIFTED = 0.5  # pixels, in each direction
MOST_THICKER = 0.3  # of the way to the brightest, or darkest, of a pixel's neighbours
MOST_BRIGHTER = 1.5  # the power that dims dashes, or its inverse that brightens them; black and white stay
FAINT = 0.2  # of full brightness: what lies below is halo
MOST_CONTRAST = 1.35  # times as bright, or the inverse, are all dashes of a kind beside the discs


def varied_brightness(strength: float, seed: int, images: np.ndarray) -> Tensor:
    """(B, 2) float32: how much brighter the dashes of the long curves, and of the short ones, of these images are
    drawn: the same for an image each time. strength: as in varied(). images: (B,) their numbers."""
    chosen, long, short = (uniform(seed, part, images) for part in range(3))
    powers = np.where(chosen < 0.5, strength, 0.0) * np.stack([2 * long - 1, 2 * short - 1])
    return torch.from_numpy((MOST_CONTRAST**powers.T).astype(np.float32))


def varied(strength: float) -> Callable[[Tensor, torch.Generator], Tensor]:
    """A function of images (B, S) uint8 and a generator on their device that draws the changes; uint8 again.

    strength: above 0, up to 1 for changes up to those above.
    """

    def vary(pixels: Tensor, generator: torch.Generator) -> Tensor:
        count, side = len(pixels), math.isqrt(pixels.shape[1])
        chosen = torch.rand((6, count, 1, 1), generator=generator, device=pixels.device)
        some = strength * (chosen[0] < 0.5)
        down, right, thicker, darker, halo = (some * (2 * share - 1) for share in chosen[1:])
        images = pixels.view(count, side, side).float() / 255
        images = _shifted(images, MOST_SHIFTED * down, 1)
        images = _shifted(images, MOST_SHIFTED * right, 2)
        images = _thickened(images, MOST_THICKER * thicker)
        images = images / images.amax(dim=(1, 2), keepdim=True).clamp(min=1 / 255)  # discs are white in each drawing
        images = images.pow(MOST_BRIGHTER**darker)
        images = images * (1 + halo * (1 - images / FAINT).clamp(min=0))
        return (images * 255).round().to(torch.uint8).flatten(1)

    return vary


def _shifted(images: Tensor, way: Tensor, axis: int) -> Tensor:
    """Moved on along an axis by less than a pixel, (B, 1, 1): each pixel is a mean of two."""
    before = F.pad(images, (0, 0, 1, 0) if axis == 1 else (1, 0)).narrow(axis, 0, images.shape[axis])
    after = F.pad(images, (0, 0, 0, 1) if axis == 1 else (0, 1)).narrow(axis, 1, images.shape[axis])
    return images + way.abs() * (torch.where(way > 0, before, after) - images)


def _thickened(images: Tensor, way: Tensor) -> Tensor:
    """So much of the way to the brightest of each pixel's 3 x 3, or, below 0, to the darkest."""
    brightest = F.max_pool2d(images[:, None], 3, 1, 1)[:, 0]
    darkest = -F.max_pool2d(-images[:, None], 3, 1, 1)[:, 0]
    return images + way.abs() * (torch.where(way > 0, brightest, darkest) - images)
