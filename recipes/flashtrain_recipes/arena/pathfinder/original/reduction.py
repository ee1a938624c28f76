"""Images made smaller by a Lanczos filter (a = 3) as Pillow does it, in whole numbers: the same on every machine.

The filter is as wide as three pixels of the small image to each side and has negative parts: a bright shape gets a
faint ring around it. Rows are reduced first, rounded and clipped to a byte, then columns.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

_SUPPORT = 3  # pixels of the small image to each side
_BITS = 22  # of a weight's fraction


def reduced(images: np.ndarray, size: int) -> np.ndarray:
    """(..., size, size) uint8 of (..., fine, fine) uint8."""
    weights = _weights(images.shape[-1], size)
    rows = _rounded(images.astype(np.int64) @ weights.T)
    return _rounded(weights @ rows).astype(np.uint8)


def _rounded(sums: np.ndarray) -> np.ndarray:
    return np.clip((sums + (1 << (_BITS - 1))) >> _BITS, 0, 255)


@lru_cache(maxsize=32)
def _weights(fine: int, size: int) -> np.ndarray:
    """(size, fine) int64: each small pixel's weights, as parts of 2^22; cut at the image's edges and summing to one."""
    scale = fine / size
    weights = np.zeros((size, fine))
    for small in range(size):
        centre = (small + 0.5) * scale
        first = max(0, int(centre - _SUPPORT * scale + 0.5))
        last = min(fine, int(centre + _SUPPORT * scale + 0.5))
        away = (np.arange(first, last) - centre + 0.5) / scale
        kernel = np.where(np.abs(away) <= _SUPPORT, np.sinc(away) * np.sinc(away / _SUPPORT), 0.0)
        weights[small, first:last] = kernel / kernel.sum()
    scaled = weights * (1 << _BITS)
    return np.trunc(scaled + np.copysign(0.5, scaled)).astype(np.int64)
