"""The sizes, distances and counts, in pixels, of Pathfinder images of each side.

The task is of Linsley et al. 2018 (arXiv:1805.08315); the values for sides 32 to 256 are those that
the Long Range Arena used (Tay et al. 2020, arXiv:2011.04006). Side 128 is its Path-X.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from flashtrain.errors import at_least, unknown

# Dashes of each of the two long curves: the more, the harder to follow from end to end.
CONTOURS = {"hard": 14, "intermediate": 9, "easy": 6}
MIN_DASHES, MAX_DASHES = 2, 20
MIN_SIDE = 24


@dataclass(frozen=True)
class PathfinderParameters:
    """The parameters of the image generator; lengths are in pixels."""

    side: int  # of the square image
    padding: int  # width of the frame that nothing may enter
    # Between the long curves' first tips; the first of them is twice as far from the edges.
    seed_distance: int
    marker_radius: float  # of the disc on a tip
    dash_length: int
    thickness: float  # of a dash
    margins: tuple[int, ...]  # the free space around dashes; each image draws one of these
    continuity: float  # the larger, the straighter the curves
    distractors: int  # short curves, at most
    long_contrast: float  # what dashes of the long curves are multiplied by; 1: as bright as a disc
    short_contrast: float  # the same of the short curves
    contour_dashes: int = CONTOURS["hard"]  # of a long curve
    distractor_dashes: int = CONTOURS["hard"] // 3  # of a short curve

    @property
    def max_dashes(self) -> int:
        """The most dashes of an image: those of two long curves and of all distractors."""
        return 2 * self.contour_dashes + self.distractors * self.distractor_dashes


# The Arena's settings (google-research/long-range-arena, lra_benchmarks/data/pathfinder.py). Its
# snake_contrast_list is the short curves' contrast, and times paddle_contrast_list the long ones'.
# At side 32 dashes are one fine pixel wide, which leaves half of it.
_ARENA = {
    32: PathfinderParameters(32, 1, 7, 1.5, 2, 0.5, (1,), 1.0, 5, 1.5, 2.0),
    64: PathfinderParameters(64, 1, 12, 2.5, 5, 1.0, (1,), 1.8, 5, 0.8, 0.8),
    128: PathfinderParameters(128, 1, 20, 3.0, 5, 1.5, (2, 3), 1.8, 8, 0.9, 0.9),
    256: PathfinderParameters(256, 22, 27, 5.0, 5, 2.0, (3,), 1.8, 7, 1.0, 1.0),
}


def of_side(side: int, contour: str = "hard") -> PathfinderParameters:
    """Return the parameters for images of a side.

    Sides 32, 64, 128 and 256 are the Long Range Arena's. Between two of them, every value is
    interpolated in log2(side) and rounded to what can be drawn (whole pixels; half ones for
    thickness and radius); the margins are the smaller side's up to the middle and the larger's from
    there. Below 32 and above 256, dashes are those of 32 and of 256, while padding and
    seed_distance scale with the side.

    Args:
        contour: a name of CONTOURS, or the number of dashes of a target contour.
            Distractors have a third as many.

    Raises:
        UserError: there is no such contour, or the side is too small.
    """
    dashes = dashes_in(contour)[-1]
    at_least("side", side, MIN_SIDE)
    return replace(_sized(side), contour_dashes=dashes, distractor_dashes=max(1, dashes // 3))


def contours_in(contour: str) -> list[str]:
    """Return the contours of one length that a contour consists of: "3-6" gives those
    of 3, 4, 5 and 6 dashes."""
    names = {dashes: name for name, dashes in CONTOURS.items()}
    return [names.get(dashes, str(dashes)) for dashes in dashes_in(contour)]


def contour_words(contour: str) -> str:
    """Return a contour in words, as "hard contours" or "contours of 3 to 6 dashes"."""
    if contour in CONTOURS:
        return f"{contour} contours"
    return f"contours of {contour.replace('-', ' to ')} dashes"


def dashes_in(contour: str) -> range:
    """Return the numbers of dashes that a contour's long curves may have. Raises UserError
    for an unknown contour."""
    if contour in CONTOURS:
        return range(CONTOURS[contour], CONTOURS[contour] + 1)
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", contour)
    numbers = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not MIN_DASHES <= numbers[0] <= numbers[1] <= MAX_DASHES:
        others = (f"a number of dashes from {MIN_DASHES} to {MAX_DASHES}", "a range such as 3-6")
        raise unknown("contour", contour, (*CONTOURS, *others))
    return range(numbers[0], numbers[1] + 1)


def _sized(side: int) -> PathfinderParameters:
    smallest, largest = min(_ARENA), max(_ARENA)
    if side in _ARENA:
        return _ARENA[side]
    if side < smallest or side > largest:
        nearest = _ARENA[smallest if side < smallest else largest]
        scale = side / nearest.side
        return replace(
            nearest,
            side=side,
            padding=max(1, round(nearest.padding * scale)),
            seed_distance=min((side - 1) // 4, round(nearest.seed_distance * scale)),
        )
    below = _ARENA[max(known for known in _ARENA if known < side)]
    above = _ARENA[min(known for known in _ARENA if known > side)]
    share = math.log2(side / below.side)

    def between(name: str, step: float = 1.0) -> float:
        first, last = getattr(below, name), getattr(above, name)
        return round((first + share * (last - first)) / step) * step

    return PathfinderParameters(
        side=side,
        padding=int(between("padding")),
        seed_distance=int(between("seed_distance")),
        marker_radius=between("marker_radius", 0.5),
        dash_length=int(between("dash_length")),
        thickness=between("thickness", 0.5),
        margins=(below if share < 0.5 else above).margins,
        continuity=between("continuity", 0.1),
        distractors=int(between("distractors")),
        long_contrast=(1 - share) * below.long_contrast + share * above.long_contrast,
        short_contrast=(1 - share) * below.short_contrast + share * above.short_contrast,
    )
