"""Everything a walk looks up: directions, what their dashes occupy, and which directions may follow which.

All tips lie on whole pixels, so that a direction is one of finitely many: the 360 whole degrees that a curve may begin
with, then one for each pixel of the circle on which the next tip must lie. What a dash of each occupies is drawn once,
and a walk is then nothing but additions and comparisons of small whole numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from flashtrain_recipes.arena.pathfinder.parameters import PathfinderParameters
from flashtrain_recipes.arena.pathfinder.raster import capsule_coverage

DEGREES = 360
ANGLE_CODES = 65536  # an angle is stored in 16 bits, as so many parts of a full turn
FULL = 255  # an occupied pixel of a mask


class WalkTables(NamedTuple):
    """Tables for one margin. Positions are flat indices into a mask of rows `stride` long, `border` wider on each side.

    D directions (360 whole degrees, then K of the circle), in `angle_codes` (D,) uint16.
    first_step (D,): from a first dash's tail to its head. ahead (D,): from a head to the pivot of the next dash.
    ring (K,): from a pivot to the possible heads. dash_start (D + 1,): the dash of direction d occupies, relative to
    its head, dash_pixels[dash_start[d]:dash_start[d + 1]] with dash_values (uint8, 1 to 255).
    followers (D, F), follower_weights (D, F): circle pixels that may follow, and cos^2(c |turn|); follower_count (D,).
    disc: the pixels within the margin. frame (rows * stride,) uint8: the mask of an empty image, outside included.
    """

    angle_codes: np.ndarray
    first_step: np.ndarray
    ahead: np.ndarray
    ring: np.ndarray
    dash_start: np.ndarray
    dash_pixels: np.ndarray
    dash_values: np.ndarray
    followers: np.ndarray
    follower_weights: np.ndarray
    follower_count: np.ndarray
    disc: np.ndarray
    frame: np.ndarray
    stride: int
    border: int


def walk_tables(parameters: PathfinderParameters, margin: int) -> WalkTables:
    """The tables of an image with this margin around its dashes."""
    length = parameters.dash_length
    reach = math.ceil(length + parameters.thickness / 2 + margin) + 1
    # From a head inside the image: on to the pivot, to the next head, and whatever its dash or margin reaches from it.
    border = reach + length + 3 * margin + 2
    stride = parameters.side + 2 * border

    circle = circle_pixels(length + margin)
    angles = np.concatenate([np.radians(np.arange(DEGREES)), np.arctan2(circle[:, 1], circle[:, 0])])
    codes = np.round(angles / (2 * np.pi) * ANGLE_CODES).astype(np.int64) % ANGLE_CODES
    directions = unit_vectors(codes)

    dashes = [_dash(direction, parameters, margin, reach) for direction in directions]
    pixels = [positions[:, 1] * stride + positions[:, 0] for positions, _ in dashes]
    followers, weights, count = _followers(codes, parameters.continuity)
    frame = np.full((stride, stride), FULL, dtype=np.uint8)
    inside = slice(border + parameters.padding, border + parameters.side - parameters.padding)
    frame[inside, inside] = 0
    return WalkTables(
        angle_codes=codes.astype(np.uint16),
        first_step=_flat(length * directions, stride),
        ahead=_flat(margin * directions, stride),
        ring=_flat(circle, stride),
        dash_start=np.cumsum([0, *map(len, pixels)]).astype(np.int64),
        dash_pixels=np.concatenate(pixels).astype(np.int64),
        dash_values=np.concatenate([values for _, values in dashes]),
        followers=followers,
        follower_weights=weights,
        follower_count=count,
        disc=_flat(_disc_pixels(margin), stride),
        frame=frame.ravel(),
        stride=stride,
        border=border,
    )


def unit_vectors(codes: np.ndarray) -> np.ndarray:
    """(..., 2) float64, (x, y), of directions stored as angle codes."""
    angles = codes * (2 * np.pi / ANGLE_CODES)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)


def circle_pixels(radius: int) -> np.ndarray:
    """(K, 2) whole (x, y): the pixels that a circle around (0, 0) passes through, in the order of their angles."""
    angles = np.linspace(0, 2 * np.pi, 64 * radius, endpoint=False)
    pixels = _whole(radius * np.stack([np.cos(angles), np.sin(angles)], axis=1))
    kept = list(dict.fromkeys(map(tuple, pixels.tolist())))
    return np.array(sorted(kept, key=lambda pixel: math.atan2(pixel[1], pixel[0])), dtype=np.int64)


def _dash(
    direction: np.ndarray, parameters: PathfinderParameters, margin: int, reach: int
) -> tuple[np.ndarray, np.ndarray]:
    """What a dash ending in (0, 0) keeps for itself: (positions (n, 2) as (x, y), values (n,) uint8)."""
    radius = parameters.thickness / 2 + margin
    coverage = capsule_coverage(-parameters.dash_length * direction, np.zeros(2), radius, reach)
    values = _whole(coverage * FULL).astype(np.uint8)
    rows, columns = np.nonzero(values)
    return np.stack([columns, rows], axis=1) - reach, values[rows, columns]


def _followers(codes: np.ndarray, continuity: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each direction, the circle pixels with a weight above zero, and the weights."""
    angles = codes * (2 * np.pi / ANGLE_CODES)
    turn = np.abs(angles[:, None] - angles[None, DEGREES:])
    turn = np.minimum(turn, 2 * np.pi - turn)
    weight = np.cos(np.minimum(continuity * turn, np.pi / 2)) ** 2
    possible = weight > 1e-6
    count = possible.sum(axis=1)
    followers = np.zeros((len(codes), int(count.max())), dtype=np.int64)
    weights = np.zeros(followers.shape)
    for direction, found in enumerate(possible):
        chosen = np.flatnonzero(found)
        followers[direction, : len(chosen)] = chosen
        weights[direction, : len(chosen)] = weight[direction, chosen]
    return followers, weights, count.astype(np.int64)


def _disc_pixels(radius: int) -> np.ndarray:
    around = np.arange(-radius, radius + 1)
    x, y = (axis.ravel() for axis in np.meshgrid(around, around))
    near = x**2 + y**2 <= radius**2
    return np.stack([x[near], y[near]], axis=1)


def _whole(values: np.ndarray) -> np.ndarray:
    """Rounded to int64, and the same on every machine: a value beside a half must not hang on its cosine's last bit."""
    return np.rint(np.round(values, 6)).astype(np.int64)


def _flat(steps: np.ndarray, stride: int) -> np.ndarray:
    """(n, 2) steps (x, y), rounded to pixels, as differences of flat positions."""
    whole = _whole(steps)
    return whole[:, 1] * stride + whole[:, 0]
