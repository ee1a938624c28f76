"""What a dash and a disc look like: drawn on a grid twice as fine, then reduced by a Lanczos filter, as Pillow does.

A dash is drawn in a window around the tip that it starts from. The window is 4 h + 1 fine pixels wide and 2 h + 1 small
ones, so that it is made a little less than half as small: the larger the window, and with it the margin, the fainter.

Pillow draws a line one pixel wide by Bresenham's steps and a wider one as a parallelogram, whose corners it rounds to
whole pixels: it is not exactly as wide in each direction. From Pillow 5 to 13 (Draw.c) that has not changed for lines.
Its Lanczos filter (a = 3), here in whole numbers and so the same on every machine, is as wide as three pixels of the
small image to each side and has negative parts: a bright shape gets a faint ring around it. Rows are reduced first,
rounded and clipped to a byte, then columns.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from flashtrain_recipes.arena.pathfinder.parameters import PathfinderParameters

Point = tuple[int, int]  # (x, y)


def line(start: Point, end: Point, width: int, size: int) -> np.ndarray:
    """(size, size) bool, [y, x]: the pixels of a line from one pixel to another, which lie inside with their width."""
    if start == end:
        drawn = np.zeros((size, size), dtype=bool)
        drawn[start[1], start[0]] = True
        return drawn
    return _thin(start, end, size) if width <= 1 else _filled(_corners(start, end, width), size)


def _thin(start: Point, end: Point, size: int) -> np.ndarray:
    """One pixel for each step along the longer axis; a half is rounded on, away from the start."""
    along_x, along_y = end[0] - start[0], end[1] - start[1]
    longer = max(abs(along_x), abs(along_y))
    steps = np.arange(longer + 1)

    def moved(along: int) -> np.ndarray:
        return (2 * steps * abs(along) + longer) // (2 * longer) * (1 if along >= 0 else -1)

    drawn = np.zeros((size, size), dtype=bool)
    drawn[start[1] + moved(along_y), start[0] + moved(along_x)] = True
    return drawn


def _corners(start: Point, end: Point, width: int) -> list[Point]:
    """The parallelogram's corners. An even width has its odd pixel on one side: below a line to the right."""
    along_x, along_y = end[0] - start[0], end[1] - start[1]
    length = math.hypot(along_x, along_y)
    wide, narrow = _half_away((width - 1) / 2) / length, _half_back((width - 1) / 2) / length
    left, right = _half_back(narrow * along_y), _half_back(wide * along_y)
    below, above = _half_back(wide * along_x), _half_back(narrow * along_x)
    return [
        (start[0] - left, start[1] + below),
        (end[0] - left, end[1] + below),
        (end[0] + right, end[1] - above),
        (start[0] + right, start[1] - above),
    ]


def _filled(corners: list[Point], size: int) -> np.ndarray:
    """All pixels of a convex polygon: of each row, from the first edge's crossing to the last one's."""
    drawn = np.zeros((size, size), dtype=bool)
    edges = list(zip(corners, corners[1:] + corners[:1], strict=True))
    rows = [y for _, y in corners]
    for row in range(min(rows), max(rows) + 1):
        crossings: list[float] = []
        for (x0, y0), (x1, y1) in edges:
            if y0 == y1 == row:
                crossings += [x0, x1]
            elif y0 != y1 and min(y0, y1) <= row <= max(y0, y1):
                slope = np.float32(x1 - x0) / np.float32(y1 - y0)  # Pillow keeps slopes and crossings in 32 bits
                crossings.append(float(np.float32((row - y0) * slope + np.float32(x0))))
        drawn[row, _half_away(min(crossings)) : _half_back(max(crossings)) + 1] = True
    return drawn


def _half_away(value: float) -> int:
    """Rounded; a half away from zero."""
    return int(math.copysign(math.floor(abs(value) + 0.5), value))


def _half_back(value: float) -> int:
    """Rounded; a half towards zero."""
    return int(math.copysign(math.ceil(abs(value) - 0.5), value))


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


FINER = 2  # the Arena's antialias_scale
DEGREES = 360


def ring(radius: int) -> np.ndarray:
    """(K, 2) whole (x, y): where the next tip may lie around a pivot at (0, 0), by y, then x.

    The points of a circle, one pixel apart along it, rounded down: the circle is shifted by half a pixel up and left.
    """
    angles = np.arange(0, 360, 360 / (2 * radius * np.pi)) * np.pi / 180
    points = [(math.floor(radius * math.sin(angle)), math.floor(radius * math.cos(angle))) for angle in angles]
    return np.unique(points, axis=0)[:, ::-1]


def directions(parameters: PathfinderParameters, margin: int) -> np.ndarray:
    """(D,) radians from -pi to pi: 360 whole degrees that a curve may begin with (0 to 179, then -180 to -1), then
    those of the ring's points seen from a pivot."""
    degrees = (np.arange(DEGREES) + 180) % DEGREES - 180
    points = ring(parameters.dash_length + margin)
    return np.concatenate([degrees * np.pi / 180, np.arctan2(points[:, 1], points[:, 0])])


def turned_back(angles: np.ndarray) -> np.ndarray:
    """The opposite directions, again from -pi to pi."""
    return np.where(angles < 0, angles + np.pi, angles - np.pi)


def steps(length: float, angles: np.ndarray) -> np.ndarray:
    """(D, 2) float64, (x, y): a length in each direction. A step leads to the next whole pixel right and down of it.

    One that is whole but for a cosine's last bit is rounded up or not as 64 bits have it where it begins: from row 3, a
    step of 9 to the left ends in row 4, from row 30 in row 30. So Python's cosine, which is the C library's.
    """
    cosines, sines = (np.array([function(angle) for angle in angles]) for function in (math.cos, math.sin))
    return length * np.stack([cosines, sines], axis=1)


def half_window(parameters: PathfinderParameters, margin: int) -> int:
    """Pixels from a window's middle to its edge."""
    return parameters.dash_length + math.ceil(parameters.thickness) + margin


def fine_dashes(parameters: PathfinderParameters, margin: int) -> np.ndarray:
    """(D, 4 h + 1, 4 h + 1) bool: the dash of each direction on the finer grid.

    A curve's first dash starts from its tail, every other from its head, back towards its tail.
    """
    angles = directions(parameters, margin)
    angles[DEGREES:] = turned_back(angles[DEGREES:])
    middle = FINER * half_window(parameters, margin)
    width = max(1, round(FINER * parameters.thickness))
    ends = np.ceil(middle + steps(FINER * parameters.dash_length, angles))
    return np.stack([line((middle, middle), (int(x), int(y)), width, 2 * middle + 1) for x, y in ends])


def dash_windows(parameters: PathfinderParameters, margin: int) -> np.ndarray:
    """(D, 2 h + 1, 2 h + 1) uint8: dashes, not yet times their contrast."""
    fine = fine_dashes(parameters, margin).astype(np.uint8) * 255
    return reduced(fine, 2 * half_window(parameters, margin) + 1)


def mask_windows(parameters: PathfinderParameters, margin: int) -> np.ndarray:
    """(D, 2 h + 1, 2 h + 1) uint8: what dashes keep for themselves, with the margin around them."""
    fine = fine_dashes(parameters, margin)
    reach = FINER * margin
    wide = np.zeros_like(fine)
    size = fine.shape[-1]
    padded = np.pad(fine, ((0, 0), (reach, reach), (reach, reach)))
    for x, y in disc_pixels(reach):
        wide |= padded[:, reach + y : reach + y + size, reach + x : reach + x + size]
    return reduced(wide.astype(np.uint8) * 255, 2 * half_window(parameters, margin) + 1)


def disc_pixels(radius: float) -> np.ndarray:
    """(n, 2) whole (x, y) within a radius of (0, 0)."""
    around = np.arange(-math.ceil(radius), math.ceil(radius) + 1)
    x, y = (axis.ravel() for axis in np.meshgrid(around, around))
    near = x**2 + y**2 <= radius**2
    return np.stack([x[near], y[near]], axis=1)


def disc_windows(radius: float) -> np.ndarray:
    """(C, C, 2 g + 1, 2 g + 1) uint8, [place y, place x, y, x]: a disc for each place beside the image's edges.

    Unlike dashes, discs are reduced on the whole image, whose edge cuts the filter. C = 2 (g + 3) + 1 places: as many
    pixels from the first edge, the middle one for all that are far from both, then as many from the last (disc_place).
    The disc lies around a corner of the finer grid's pixels, a quarter of a pixel up and left of its tip.
    """
    reach = math.ceil(radius) + 3
    places = 2 * (reach + 3) + 1
    middle = np.arange(places) * FINER
    fine = np.arange(places * FINER)
    square = (fine[None, :] - middle[:, None]) ** 2  # [place, fine pixel]
    windows = np.zeros((places, places, 2 * reach + 1, 2 * reach + 1), dtype=np.uint8)
    for y in range(places):
        discs = square[y][None, :, None] + square[:, None, :] <= (FINER * radius) ** 2
        small = np.pad(reduced(discs.astype(np.uint8) * 255, places), ((0, 0), (reach, reach), (reach, reach)))
        for x in range(places):
            windows[y, x] = small[x, y : y + 2 * reach + 1, x : x + 2 * reach + 1]
    return windows
