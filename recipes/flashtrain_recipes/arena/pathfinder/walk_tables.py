"""The tables of the random walk (walk.py): for each direction the pixels of a dash, where the next
dash may lie, and how likely each of these places is.

D directions (windows.directions), of which the last K point to the ring's points (windows.ring).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flashtrain_recipes.arena.pathfinder.parameters import PathfinderParameters
from flashtrain_recipes.arena.pathfinder.windows import (
    DEGREES,
    directions,
    disc_pixels,
    half_window,
    mask_windows,
    ring,
    steps,
    turned_back,
)

FULL = 255  # an occupied pixel of a mask
_COLLISION = 1.8  # of two masks' sum, where each is at most 1
# Of masks, which have 32 bits.
_FRACTIONS = (np.arange(FULL + 1) / FULL).astype(np.float32).astype(np.float64)


class WalkTables(NamedTuple):
    """Tables of the walk for one margin. Positions are flat indices into a mask; steps are
    vectors (y, x), and a point plus a step is rounded up to whole pixels.

    The dash of direction d occupies dash_pixels[dash_start[d]:dash_start[d + 1]], relative to the
    tip that it starts from. A first dash's fully occupied pixels are the rows (y, x, length) of
    runs[run_start[d]:run_start[d + 1]].
    """

    to_head: np.ndarray  # (360, 2): from a first dash's tail to its head
    to_pivot: np.ndarray  # (360, 2): from there back to the pivot
    ahead: np.ndarray  # (D, 2): from a pivot to the next
    ring: np.ndarray  # (K, 2): from a pivot to the possible heads
    weights: np.ndarray  # (D, K): how likely they are, cos^2(c |turn|)
    dash_start: np.ndarray  # (D + 1,)
    dash_pixels: np.ndarray
    dash_values: np.ndarray  # uint8, 1 to 255
    run_start: np.ndarray  # (361,)
    runs: np.ndarray
    possible: np.ndarray  # (360,) bool: whether a curve begins in this direction (_surrounded)
    disc: np.ndarray  # the pixels within the margin
    limits: np.ndarray  # (256,) int64: at a mask of this value, the value of a dash that collides
    open_share: np.ndarray  # (256,): at a mask of this value, the share of a weight that is left
    frame: np.ndarray  # (rows * stride,) uint8: an image without dashes
    inside: np.ndarray  # as frame: 255 in the image, 0 outside, where nothing is ever occupied
    stride: int  # the length of a mask's row
    border: int  # pixels of a mask on each side of the image


def walk_tables(parameters: PathfinderParameters, margin: int) -> WalkTables:
    """Return the tables for images with this margin, in pixels, around their dashes."""
    length, half = parameters.dash_length, half_window(parameters, margin)
    border = half + 2 * margin + length + 1
    stride = parameters.side + 2 * border
    angles = directions(parameters, margin)
    windows = mask_windows(parameters, margin)
    pixels, values = [], []
    for window in windows:
        rows, columns = np.nonzero(window)
        pixels.append((rows - half) * stride + columns - half)
        values.append(window[rows, columns])
    runs = [_runs(window, length + margin) for window in windows[:DEGREES]]
    frame = np.zeros((stride, stride), dtype=np.uint8)
    frame[border:-border, border:-border] = FULL
    inside = frame.copy()
    edge = border + parameters.padding
    frame[edge:-edge, edge:-edge] = 0
    disc = disc_pixels(margin)
    return WalkTables(
        to_head=steps(length, angles[:DEGREES])[:, ::-1].copy(),
        to_pivot=steps(length + margin, turned_back(angles[:DEGREES]))[:, ::-1].copy(),
        ahead=steps(length + 2 * margin, angles)[:, ::-1].copy(),
        ring=ring(length + margin)[:, ::-1].copy(),
        weights=_weights(angles, parameters.continuity),
        dash_start=np.cumsum([0, *map(len, pixels)]).astype(np.int64),
        dash_pixels=np.concatenate(pixels).astype(np.int64),
        dash_values=np.concatenate(values),
        run_start=np.cumsum([0, *map(len, runs)]).astype(np.int64),
        runs=np.concatenate(runs),
        possible=np.array([_surrounded(rows) for rows in runs]),
        disc=disc[:, 1] * stride + disc[:, 0],
        limits=(_FRACTIONS[:, None] + _FRACTIONS[None, :] < _COLLISION)
        .sum(axis=1)
        .astype(np.int64),
        open_share=1 - _FRACTIONS,
        frame=frame.ravel(),
        inside=inside.ravel(),
        stride=stride,
        border=border,
    )


def _weights(angles: np.ndarray, continuity: float) -> np.ndarray:
    turn = np.abs(angles[None, DEGREES:] - angles[:, None])
    turn = np.minimum(turn, 2 * np.pi - turn)
    weights: np.ndarray = np.maximum(np.cos(np.minimum(turn * continuity, np.pi / 2)), 0) ** 2
    return weights


def _runs(window: np.ndarray, reach: int) -> np.ndarray:
    # (R, 3) rows (y, x, length) of pixels that are wholly occupied, around the first dash's tail.
    # The program looks at 2 reach + 1 pixels around it, and its window lies one pixel too far
    # down and right there.
    half = window.shape[0] // 2
    found = []
    for y in range(-reach - 1, reach):
        full = window[half + y, half - reach - 1 : half + reach] == FULL
        edges = np.flatnonzero(np.diff(np.concatenate([[0], full.astype(np.int8), [0]])))
        found += [(y + 1, first - reach, last - first) for first, last in edges.reshape(-1, 2)]
    return np.array(found, dtype=np.int64).reshape(-1, 3)


def _surrounded(runs: np.ndarray) -> bool:
    # Whether some of the pixels lie in each closed quadrant around (0, 0). Where none does, all
    # lie outside of the image for one of its corners. What OpenCV finds there is below zero, and
    # the program then takes the whole image for occupied: at side 32, only 30 of the 360
    # directions begin a curve.
    y, first, last = runs[:, 0], runs[:, 1], runs[:, 1] + runs[:, 2] - 1
    return all(
        ((y * down >= 0) & (end * right >= 0)).any()
        for down in (-1, 1)
        for right, end in ((-1, first), (1, last))
    )
