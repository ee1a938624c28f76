"""The pixels of a dash and of a disc, drawn by Pillow on a grid twice as fine and reduced
by its Lanczos filter.

D directions, K points of the ring, h pixels from a window's middle to its edge.

A dash is drawn in a window around the tip that it starts from: on the fine grid the window is
4 h + 1 pixels wide, and it is reduced to 2 h + 1, a little more than half. How much more depends on
h, and with it on the margin: in a larger window a dash is a little fainter.

Pillow draws a line one pixel wide by Bresenham's steps and a wider one as a parallelogram, whose
corners it rounds to whole pixels: it is not exactly as wide in each direction. From Pillow 5 to 13
that has not changed. Its Lanczos filter is as wide as three pixels of the small image to each side
and has negative parts: a bright shape gets a faint ring.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image, ImageDraw

from flashtrain_recipes.arena.pathfinder.parameters import PathfinderParameters

FINER = 2  # the Arena's antialias_scale
DEGREES = 360


def ring(radius: int) -> np.ndarray:
    """Return the points (x, y), (K, 2) integers, where the next dash's tip may lie
    around a pivot at (0, 0).

    They are a circle's points, one pixel apart along it, ordered by y, then x. They are rounded
    down, which shifts the circle by half a pixel up and left.
    """
    angles = np.arange(0, 360, 360 / (2 * radius * np.pi)) * np.pi / 180
    points = [
        (math.floor(radius * math.sin(angle)), math.floor(radius * math.cos(angle)))
        for angle in angles
    ]
    return np.unique(points, axis=0)[:, ::-1]


def directions(parameters: PathfinderParameters, margin: int) -> np.ndarray:
    """Return the directions of dashes, (D,) radians from -pi to pi.

    The first 360 are the whole degrees that a curve may begin with (0 to 179, then -180 to -1); the
    others point from a pivot to the points of its ring.
    """
    degrees = (np.arange(DEGREES) + 180) % DEGREES - 180
    points = ring(parameters.dash_length + margin)
    return np.concatenate([degrees * np.pi / 180, np.arctan2(points[:, 1], points[:, 0])])


def turned_back(angles: np.ndarray) -> np.ndarray:
    """Return the opposite of each direction, in radians, again from -pi to pi."""
    return np.where(angles < 0, angles + np.pi, angles - np.pi)


def steps(length: float, angles: np.ndarray) -> np.ndarray:
    """Return the vectors (x, y) of this length in the directions `angles`, (D, 2) float64.

    Callers add such a vector to a point and round the sum up to whole pixels.
    """
    # A step that is whole but for a cosine's last bit is rounded up or not as 64 bits have it where
    # it begins: from row 3, a step of 9 to the left ends in row 4, from row 30 in row 30. So
    # Python's cosine, which is the C library's.
    cosines, sines = (
        np.array([function(angle) for angle in angles]) for function in (math.cos, math.sin)
    )
    return length * np.stack([cosines, sines], axis=1)


def half_window(parameters: PathfinderParameters, margin: int) -> int:
    """Return h, the pixels from the middle of a dash's window (the small image that
    holds it) to its edge."""
    return parameters.dash_length + math.ceil(parameters.thickness) + margin


def fine_dashes(parameters: PathfinderParameters, margin: int) -> np.ndarray:
    """Return a drawing of the dash of each direction on the finer grid, (D, 4 h + 1, 4 h + 1)
    bool.

    The middle pixel is the tip that the dash is drawn from: its tail in the first 360 directions,
    which begin a curve; in the others its head, from which it is drawn back to its tail.
    """
    angles = directions(parameters, margin)
    angles[DEGREES:] = turned_back(angles[DEGREES:])
    middle = FINER * half_window(parameters, margin)
    width = max(1, round(FINER * parameters.thickness))
    drawn = []
    for x, y in np.ceil(middle + steps(FINER * parameters.dash_length, angles)):
        image = Image.new("L", (2 * middle + 1, 2 * middle + 1))
        ImageDraw.Draw(image).line([(middle, middle), (int(x), int(y))], fill=255, width=width)
        drawn.append(np.asarray(image) > 0)
    return np.stack(drawn)


def reduced(drawn: np.ndarray, size: int) -> np.ndarray:
    """Reduce drawings on a grid twice as fine as pixels, (..., fine, fine) bool, to
    (..., size, size) uint8."""
    fine = drawn.reshape(-1, *drawn.shape[-2:]).astype(np.uint8) * 255
    images = [Image.fromarray(one).resize((size, size), Image.Resampling.LANCZOS) for one in fine]
    return np.stack([np.asarray(image) for image in images]).reshape(*drawn.shape[:-2], size, size)


def dash_windows(parameters: PathfinderParameters, margin: int) -> np.ndarray:
    """Draw a dash in each of the D directions, at full brightness, in windows (D, 2
    h + 1, 2 h + 1) uint8."""
    return reduced(fine_dashes(parameters, margin), 2 * half_window(parameters, margin) + 1)


def mask_windows(parameters: PathfinderParameters, margin: int) -> np.ndarray:
    """Draw the area that a dash with its margin occupies, 0 (free) to 255, (D, 2
    h + 1, 2 h + 1) uint8."""
    fine = fine_dashes(parameters, margin)
    reach = FINER * margin
    wide = np.zeros_like(fine)
    size = fine.shape[-1]
    padded = np.pad(fine, ((0, 0), (reach, reach), (reach, reach)))
    for x, y in disc_pixels(reach):
        wide |= padded[:, reach + y : reach + y + size, reach + x : reach + x + size]
    return reduced(wide, 2 * half_window(parameters, margin) + 1)


def disc_pixels(radius: float) -> np.ndarray:
    """Return the whole points (x, y) within a radius of (0, 0), (n, 2)."""
    around = np.arange(-math.ceil(radius), math.ceil(radius) + 1)
    x, y = (axis.ravel() for axis in np.meshgrid(around, around))
    near = x**2 + y**2 <= radius**2
    return np.stack([x[near], y[near]], axis=1)


def disc_windows(radius: float) -> np.ndarray:
    """Return a small image of a disc for each position in which it looks different, (C, C, 2
    g + 1, 2 g + 1) uint8.

    The indices are [place y, place x, y, x]; g is the radius rounded up, plus 3. A disc looks
    different near an edge of the image, which cuts the filter. So each axis has C = 2 (g + 3) + 1
    places: the g + 3 pixels at its first edge, one for all pixels that are far from both, and the
    g + 3 at its last (disc_place). The disc lies around a corner of the finer grid's pixels, a
    quarter of a pixel up and left of its tip.
    """
    reach = math.ceil(radius) + 3
    places = 2 * (reach + 3) + 1
    middle = np.arange(places) * FINER
    fine = np.arange(places * FINER)
    square = (fine[None, :] - middle[:, None]) ** 2  # [place, fine pixel]
    windows = np.zeros((places, places, 2 * reach + 1, 2 * reach + 1), dtype=np.uint8)
    for y in range(places):
        discs = square[y][None, :, None] + square[:, None, :] <= (FINER * radius) ** 2
        small = np.pad(reduced(discs, places), ((0, 0), (reach, reach), (reach, reach)))
        for x in range(places):
            windows[y, x] = small[x, y : y + 2 * reach + 1, x : x + 2 * reach + 1]
    return windows
