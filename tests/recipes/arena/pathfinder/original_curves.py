"""Where the task's own program lays its dashes, in NumPy and Pillow, as we understand it: on
whole masks, one by one.

Random numbers are those of the compiled walk, in Python's whole numbers, and are asked for
in the program's order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import original_program as program
from original_program import Place

from flashtrain_recipes.arena.pathfinder.parameters import PathfinderParameters

_WORD = 2**64 - 1


def _mixed(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _WORD
    return value ^ (value >> 31)


class Chances:
    """SplitMix64 of one image of a stream."""

    def __init__(self, key: int, number: int) -> None:
        self.state = _mixed(key ^ _mixed(number + 0x9E3779B97F4A7C15 & _WORD))

    def share(self) -> float:
        self.state = self.state + 0x9E3779B97F4A7C15 & _WORD
        return (_mixed(self.state) >> 11) / 2**53

    def below(self, count: int) -> int:
        return int(self.share() * count)

    def degree(self) -> float:
        return (self.below(360) - 180) * np.pi / 180


def _reversed(angle: float) -> float:
    """As program.turned_back, of an angle that a curve begins with."""
    return angle + math.pi if angle + math.pi < math.pi else angle - math.pi


@dataclass
class Curve:
    """dashes: where each starts and its angle. last: what the last one keeps for
    itself, not yet on the mask."""

    pivot: Place
    angle: float
    last: np.ndarray
    dashes: list[tuple[Place, float]] = field(default_factory=list)
    tip: Place = (0, 0)


class Grown:
    """One image: label, start (which curve's first tip is marked), margin, attempts and dashes."""

    def __init__(self, parameters: PathfinderParameters, key: int, number: int) -> None:
        self.parameters, self.side = parameters, parameters.side
        self.chances = Chances(key, number)
        self.label = self.chances.below(2)
        margins = parameters.margins
        self.margin = margins[self.chances.below(len(margins)) if len(margins) > 1 else 0]
        frame = np.ones((self.side, self.side))
        inside = slice(parameters.padding, -parameters.padding)
        frame[inside, inside] = 0
        self.attempts, pair = 0, None
        while pair is None:
            self.attempts += 1
            self.mask = frame.copy()
            pair = self._pair()
        # The first curve's last dash stays without a mask.
        self.mask = np.maximum(self.mask, pair[1].last)
        self.dashes = pair[0].dashes + pair[1].dashes
        for _ in range(parameters.distractors):
            for _ in range(5):
                short = self._short()
                if short is not None:
                    self.dashes += short
                    break
        self.start = self.chances.below(2)

    def _pair(self) -> tuple[Curve, Curve] | None:
        first = self._first_curve()
        second = self._second_curve(first.dashes[0][0]) if first is not None else None
        if first is None or second is None:
            return None
        for _ in range(self.parameters.contour_dashes - 1):
            for curve in (first, second):
                if not self._extend(curve):
                    return None
        return first, second

    def _first_curve(self) -> Curve | None:
        near = 2 * self.parameters.seed_distance
        lined = np.ones_like(self.mask)
        lined[near:-near, near:-near] = self.mask[near:-near, near:-near]
        return self._seeded(lined)

    def _second_curve(self, tail: Place) -> Curve | None:
        for _ in range(3):
            angle, around = self.chances.degree(), self.chances.below(360) * np.pi / 180
            far = self.parameters.seed_distance
            place = (
                round(tail[0] + far * math.sin(around)),
                round(tail[1] + far * math.cos(around)),
            )
            curve = self._begun(place, angle)
            if curve is not None:
                return curve
        return None

    def _seeded(self, lined: np.ndarray) -> Curve | None:
        """A curve that begins where its first dash, moved on by one pixel down and
        right, touches nothing."""
        for _ in range(3):
            angle = self.chances.degree()
            reach = self.parameters.dash_length + self.margin
            _, kept = program.dash(
                2 * reach + 1, (reach + 1, reach + 1), angle, self.parameters, self.margin
            )
            taken = program.dilated(lined, kept == 1, outside=-np.inf)
            # Of some pixel, all of the dash lies outside: the program finds no place then.
            if taken.min() == -np.inf:
                return None
            free = np.argwhere(taken <= 0.3)
            if not len(free):
                return None
            y, x = free[self.chances.below(len(free))]
            curve = self._begun((int(y), int(x)), angle)
            if curve is not None:
                return curve
        return None

    def _begun(self, tail: Place, angle: float) -> Curve | None:
        length = self.parameters.dash_length
        head = program.stepped(tail, angle, length)
        pivot = program.stepped(head, _reversed(angle), length + self.margin)
        if not all(0 <= value < self.side for value in (*head, *pivot)):
            return None
        _, kept = program.dash(self.side, tail, angle, self.parameters, self.margin)
        return Curve(pivot, angle, kept, [(tail, angle)], head)

    def _extend(self, curve: Curve) -> bool:
        length, margin = self.parameters.dash_length, self.margin
        pivot = program.stepped(curve.pivot, curve.angle, length + 2 * margin)
        taken = program.dilated(self.mask, program.disc(margin))
        around = np.arange(0, 360, 360 / (2 * (length + margin) * np.pi)) * np.pi / 180
        points = np.stack([np.sin(around), np.cos(around)], axis=1) * (length + margin) + pivot
        heads = np.unique(
            points[((points >= 0) & (points < self.side)).all(axis=1)].astype(int), axis=0
        )
        if not len(heads):
            return False
        angles = np.arctan2(heads[:, 0] - pivot[0], heads[:, 1] - pivot[1])
        turn = np.abs(angles - curve.angle)
        turn = np.minimum(turn, 2 * np.pi - turn) * self.parameters.continuity
        weights = np.maximum(np.cos(np.minimum(turn, np.pi / 2)), 0) ** 2 * (
            1 - taken[heads[:, 0], heads[:, 1]]
        )
        if weights.sum() < 1e-4:
            return False
        upto = np.cumsum(weights / weights.sum())
        for _ in range(3):
            chosen = int(np.argmax(upto > self.chances.share()))
            head, back = (
                (int(heads[chosen, 0]), int(heads[chosen, 1])),
                program.turned_back(float(angles[chosen])),
            )
            _, kept = program.dash(self.side, head, back, self.parameters, margin)
            if (self.mask + kept.astype(np.float64)).max() < 1.8:
                self.mask = np.maximum(self.mask, curve.last)
                curve.pivot, curve.angle, curve.last, curve.tip = (
                    pivot,
                    float(angles[chosen]),
                    kept,
                    head,
                )
                curve.dashes.append((head, back))
                return True
        return False

    def _short(self) -> list[tuple[Place, float]] | None:
        before = self.mask
        if (before <= 0.3).mean() < 0.01:
            self.chances.degree()
            return None
        curve = self._seeded(before)
        for _ in range(self.parameters.distractor_dashes - 1):
            if curve is None or not self._extend(curve):
                self.mask = before
                return None
        if curve is None:
            return None
        self.mask = np.maximum(self.mask, curve.last)
        return curve.dashes
