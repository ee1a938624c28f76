"""A straight line on whole pixels, flat at both ends, as Pillow's ImageDraw draws it.

Pillow draws a line one pixel wide by Bresenham's steps and a wider one as a parallelogram, whose corners it rounds to
whole pixels: it is not exactly as wide in each direction. From Pillow 5 to 13 (Draw.c) that has not changed for lines.
"""

from __future__ import annotations

import math

import numpy as np

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
