"""How much of each pixel a dash covers, in plain NumPy: for the generator's small tables of shapes.

Pixel (x, y) is the square of width 1 around the point (x, y). Of each pixel, 2 x 2 points are looked at.
"""

from __future__ import annotations

import numpy as np

SUPERSAMPLING = 2


def capsule_coverage(tail: np.ndarray, head: np.ndarray, radius: float, reach: int) -> np.ndarray:
    """Coverage in [0, 1] of the pixels around (0, 0) by all points within `radius` of the segment from tail to head.

    tail, head: (2,) as (x, y), in pixels. Returns (2 reach + 1, 2 reach + 1), [y, x], pixel (0, 0) in its middle.
    A point of the finer grid counts in full inside the shape and fades over one step of that grid at its rim.
    """
    fine = (np.arange((2 * reach + 1) * SUPERSAMPLING) + 0.5) / SUPERSAMPLING - 0.5 - reach
    x, y = fine[None, :], fine[:, None]
    along = head - tail
    length_squared = float(along @ along)
    share = ((x - tail[0]) * along[0] + (y - tail[1]) * along[1]) / (length_squared or 1.0)
    share = np.clip(share, 0.0, 1.0)
    distance = np.hypot(x - tail[0] - share * along[0], y - tail[1] - share * along[1])
    points = np.clip((radius - distance) * SUPERSAMPLING + 0.5, 0.0, 1.0)
    size = 2 * reach + 1
    return points.reshape(size, SUPERSAMPLING, size, SUPERSAMPLING).mean(axis=(1, 3))
