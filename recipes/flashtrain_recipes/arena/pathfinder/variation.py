"""pathfinder.variation: random changes of training images' grey levels, which move no curve.

A model is to learn curves, not how one program draws them. Half of the images are shifted,
thickened or thinned, made brighter or darker, and their faint ring (halo) is strengthened or
removed. Before that, in half of the images the dashes of long curves and those of short ones are
drawn brighter or darker, each by a factor.

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

MAX_SHIFT = 0.5  # pixels, in each direction
MAX_THICKENING = 0.3  # of the difference to the brightest, or darkest, of a pixel's neighbours
MAX_POWER = 1.5  # that dims dashes, or its inverse that brightens them; black and white stay
FAINT = 0.2  # of full brightness: a pixel below is halo
MAX_CONTRAST = 1.35  # the factor of the brightness of all dashes of a kind, or its inverse


def varied_brightness(strength: float, seed: int, images: np.ndarray) -> Tensor:
    """Return random factors for the brightness of each image's long and short
    curves, (B, 2) float32.

    Args:
        strength: from 0 (factors of 1) to 1 (factors up to MAX_CONTRAST, or its inverse).
        images: (B,), the images' numbers, which with the seed decide the factors.
    """
    chosen, long, short = (uniform(seed, part, images) for part in range(3))
    powers = np.where(chosen < 0.5, strength, 0.0) * np.stack([2 * long - 1, 2 * short - 1])
    return torch.from_numpy((MAX_CONTRAST**powers.T).astype(np.float32))


def varied(strength: float) -> Callable[[Tensor, torch.Generator], Tensor]:
    """Return a function that changes images (B, S) uint8 at random, given them and a
    generator on their device.

    Args:
        strength: from above 0 to 1, for changes up to this module's MAX_ constants.
    """

    def vary(pixels: Tensor, generator: torch.Generator) -> Tensor:
        count, side = len(pixels), math.isqrt(pixels.shape[1])
        chosen = torch.rand((6, count, 1, 1), generator=generator, device=pixels.device)
        some = strength * (chosen[0] < 0.5)
        down, right, thicker, darker, halo = (some * (2 * share - 1) for share in chosen[1:])
        images = pixels.view(count, side, side).float() / 255
        images = _shifted(images, MAX_SHIFT * down, 1)
        images = _shifted(images, MAX_SHIFT * right, 2)
        images = _thickened(images, MAX_THICKENING * thicker)
        # Discs are white in each drawing.
        images = images / images.amax(dim=(1, 2), keepdim=True).clamp(min=1 / 255)
        images = images.pow(MAX_POWER**darker)
        images = images * (1 + halo * (1 - images / FAINT).clamp(min=0))
        return (images * 255).round().to(torch.uint8).flatten(1)

    return vary


def _shifted(images: Tensor, share: Tensor, axis: int) -> Tensor:
    # moved along an axis by less than a pixel, share (B, 1, 1): each pixel is a mean of two
    before = F.pad(images, (0, 0, 1, 0) if axis == 1 else (1, 0)).narrow(
        axis, 0, images.shape[axis]
    )
    after = F.pad(images, (0, 0, 0, 1) if axis == 1 else (0, 1)).narrow(axis, 1, images.shape[axis])
    return images + share.abs() * (torch.where(share > 0, before, after) - images)


def _thickened(images: Tensor, share: Tensor) -> Tensor:
    # by a share (B, 1, 1), to the brightest of each pixel's 3 x 3, or, below 0, to the darkest
    brightest = F.max_pool2d(images[:, None], 3, 1, 1)[:, 0]
    darkest = -F.max_pool2d(-images[:, None], 3, 1, 1)[:, 0]
    return images + share.abs() * (torch.where(share > 0, brightest, darkest) - images)
