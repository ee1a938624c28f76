"""Decides a Pathfinder image's label as an eye would: from the pixels alone, by following a curve from disc to disc.

It knows that there are two bright discs, that dashes are short strokes, and that a curve goes on where one stroke
points at another. It knows neither the generator's parameters nor anything that is stored beside the pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RIM = 2.0  # a disc fades out so far beyond what is wholly bright
FARTHEST_GAP = 11.0  # pixels between two strokes of a curve, at most


@dataclass
class Stroke:
    """A piece of a dash: its two ends and, for each, the unit direction in which it points away; (x, y)."""

    ends: np.ndarray
    outward: np.ndarray


def traced_label(image: np.ndarray) -> int:
    """1 where the curve that begins at one disc ends at the other; image: (side, side) uint8."""
    discs, radius = find_discs(image)
    strokes = find_strokes(image, discs, radius)
    partner = link(strokes)
    begin, goal = (stroke_at(disc, strokes) for disc in discs)
    if begin is None or goal is None:
        return 0
    stroke, end = begin
    for _ in range(len(strokes)):
        if stroke == goal[0]:
            return 1
        following = partner.get((stroke, 1 - end))  # `end` is where the curve came in
        if following is None:
            return 0
        stroke, end = following
    return 0


def find_discs(image: np.ndarray) -> tuple[np.ndarray, float]:
    """The centres (2, 2), (x, y), of the two largest solid bright shapes, and their radius."""
    bright = image >= 250
    for radius in (5, 4, 3, 2):  # the largest disc that fits into something bright
        kernel = disc_offsets(radius - 0.5)
        fitting = bright.copy()
        for x, y in kernel:
            fitting &= np.roll(bright, (-y, -x), axis=(0, 1))
        centres = [points.mean(axis=0) for points in components(fitting)]
        if len(centres) == 2:
            return np.array(centres), radius
        if len(centres) > 2:
            break
    # Discs that meet leave one shape: its two farthest points are taken.
    points = np.argwhere(fitting)[:, ::-1].astype(float)
    if len(points) == 0:
        points = np.argwhere(bright)[:, ::-1].astype(float)
    apart = np.linalg.norm(points[:, None] - points[None], axis=-1)
    first, second = np.unravel_index(apart.argmax(), apart.shape)
    return points[[first, second]], 2.0


def find_strokes(image: np.ndarray, discs: np.ndarray, radius: float) -> list[Stroke]:
    """What is left without the discs, piece by piece."""
    grey = image.astype(float)
    y, x = np.mgrid[: len(image), : len(image)]
    for disc in discs:
        grey[np.hypot(x - disc[0], y - disc[1]) < radius + RIM] = 0
    found = []
    for points in components(grey > 0.45 * grey.max()):
        weight = grey[points[:, 1].astype(int), points[:, 0].astype(int)]
        middle = np.average(points, axis=0, weights=weight)
        spread = points - middle
        axis = np.linalg.eigh((spread * weight[:, None]).T @ spread)[1][:, 1]
        from_discs = middle - discs
        nearest = np.linalg.norm(from_discs, axis=1).argmin()
        if np.linalg.norm(from_discs[nearest]) < radius + 5 and np.ptp(spread @ axis) < 3.5:
            # What sticks out of a disc is too short to have a direction: it comes from the disc's middle.
            axis = from_discs[nearest] / np.linalg.norm(from_discs[nearest])
        along = spread @ axis
        ends = middle + np.outer([along.min(), along.max()], axis)
        found.append(Stroke(ends, np.stack([-axis, axis])))
    return found


def link(strokes: list[Stroke]) -> dict[tuple[int, int], tuple[int, int]]:
    """Which end of which stroke goes on at which other, the likeliest pairs first; an end is used once."""
    ends = np.concatenate([stroke.ends for stroke in strokes])
    outward = np.concatenate([stroke.outward for stroke in strokes])
    gap = np.linalg.norm(ends[:, None] - ends[None], axis=-1)
    # Two strokes of a curve point at one spot in the gap between them.
    cost = np.full(gap.shape, np.inf)
    for share in (0.4, 0.5, 0.6, 0.7):
        reached = ends[:, None] + share * gap[..., None] * outward[:, None]
        cost = np.minimum(cost, np.linalg.norm(reached - reached.transpose(1, 0, 2), axis=-1))
    turn = np.arccos(np.clip(-(outward @ outward.T), -1, 1))
    cost = cost + 0.35 * gap + 1.2 * turn
    same = np.arange(len(ends)) // 2
    cost[(same[:, None] == same[None]) | (gap > FARTHEST_GAP) | (turn > 1.3)] = np.inf
    partner: dict[tuple[int, int], tuple[int, int]] = {}
    for pair in np.argsort(cost, axis=None):
        first, second = divmod(int(pair), len(ends))
        if not np.isfinite(cost[first, second]):
            break
        one, other = divmod(first, 2), divmod(second, 2)
        if one not in partner and other not in partner:
            partner[one], partner[other] = other, one
    return partner


def stroke_at(disc: np.ndarray, strokes: list[Stroke]) -> tuple[int, int] | None:
    """The stroke whose end points at the disc's middle, and that end."""
    best, chosen = np.inf, None
    for number, stroke in enumerate(strokes):
        for end in range(2):
            way = disc - stroke.ends[end]
            distance = np.linalg.norm(way)
            along = way @ stroke.outward[end]
            aside = np.sqrt(max(0.0, distance**2 - along**2))
            cost = distance + aside
            if along > 0 and distance < 16 and cost < best:
                best, chosen = cost, (number, end)
    return chosen


def components(mask: np.ndarray) -> list[np.ndarray]:
    """The connected pieces (8 neighbours) of a mask, each as its points (n, 2), (x, y) float."""
    left = {(int(y), int(x)) for y, x in np.argwhere(mask)}
    pieces = []
    while left:
        piece = [left.pop()]
        for y, x in piece:  # grows while it is gone through
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            piece.extend(near)
        pieces.append(np.array(piece, dtype=float)[:, ::-1])
    return pieces


def disc_offsets(radius: float) -> list[tuple[int, int]]:
    reach = int(radius)
    around = range(-reach, reach + 1)
    return [(x, y) for x in around for y in around if x * x + y * y <= radius * radius]
