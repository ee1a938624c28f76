"""How sure a measured accuracy is."""

from __future__ import annotations

import math

Z95 = 1.959964


def wilson(correct: int, count: int, z: float = Z95) -> tuple[float, float]:
    """The interval of a share of `correct` out of `count` draws (Wilson 1927); z: 1.96 for 95%. Within [0, 1]."""
    if count < 1:
        return 0.0, 1.0
    share = correct / count
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    low, high = (middle - half) / scale, (middle + half) / scale
    return 0.0 if correct == 0 else low, 1.0 if correct == count else high
