"""The plan of a micro-batch's documents over the ranks that share it: whole on a rank where they
fit, longer ones divided over as many ranks as pay.

Source: Chen et al. 2025, "Zeppelin", arXiv 2509.21841. Theirs has one layout for attention and
another for all else; here each divided document is even in tokens and in attention at once
(layout zigzag), and a rank's total is balanced, so that nothing moves between two layouts.

A plan follows from the documents' lengths, the number of ranks and the costs alone: all ranks make
the same one, and a resumed run the same as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from flashtrain.distributed.context.balance import EVEN
from flashtrain.distributed.context.document_costs import DocumentCosts
from flashtrain.distributed.context.group import block_sizes

ROOM = 1.25  # times the mean tokens of a rank: the most that one may hold
# Times the mean seconds of a rank: the most that a document may take on each of its ranks. The
# first limit whose plan is even is used, else the one with the fastest plan.
LIMITS = (EVEN, 0.75, 0.5, 0.25, 0.125, 1.5, 2.0, 4.0)


class Place(NamedTuple):
    """The neighboring ranks first .. first + ranks - 1."""

    first: int
    ranks: int


@dataclass
class DocumentPlan:
    """Which ranks hold each document, and what that makes for each rank."""

    ranks: int
    places: dict[int, Place] = field(default_factory=dict)  # of each document, by its number
    tokens: np.ndarray = field(init=False)  # (ranks,) int64
    seconds: np.ndarray = field(init=False)  # (ranks,) float64, padding not counted

    def __post_init__(self) -> None:
        self.tokens = np.zeros(self.ranks, dtype=np.int64)
        self.seconds = np.zeros(self.ranks)

    def group_of(self, rank: int) -> Place:
        """Return the ranks with which a rank shares documents, itself included."""
        shared = (one for one in self.places.values() if one.first <= rank < sum(one))
        return max(shared, key=lambda one: one.ranks, default=Place(rank, 1))

    @property
    def held(self) -> np.ndarray:
        """The number of tokens that each rank computes, (ranks,) int64: the most in its group,
        to which the others are padded."""
        held = self.tokens.copy()
        for first, ranks in sorted(set(self.places.values()), key=lambda one: one.ranks):
            held[first : first + ranks] = self.tokens[first : first + ranks].max()
        return held

    def add(self, document: int, place: Place, tokens: int, seconds: float) -> None:
        self.places[document] = place
        self.tokens[place.first : sum(place)] += tokens
        self.seconds[place.first : sum(place)] += seconds


def room_for(tokens: int, ranks: int) -> int:
    """Return the most tokens that one of the ranks may hold of so many."""
    return -(-int(ROOM * tokens) // ranks)


def plan_documents(lengths: Sequence[int], ranks: int, costs: DocumentCosts) -> DocumentPlan:
    """Plan which ranks hold which documents.

    Args:
        lengths: the tokens of each document of a micro-batch.
        ranks: the number of ranks that share the micro-batch.
        costs: the seconds of a document on one rank and on several.
    """
    mean = sum(costs.seconds(length, 1) for length in lengths) / ranks
    best, least = None, 0.0
    for limit in LIMITS:
        plan = _planned(lengths, ranks, costs, limit * mean)
        slowest = float((plan.seconds + (plan.held - plan.tokens) * costs.token).max())
        if best is None or slowest < least:
            best, least = plan, slowest
        if least <= EVEN * mean:
            break
    assert best is not None
    return best


def _planned(
    lengths: Sequence[int], ranks: int, costs: DocumentCosts, limit: float
) -> DocumentPlan:
    """Return the plan in which a document takes at most `limit` seconds on each of its ranks, if
    that is possible: those of most ranks first, then the longest, each to the ranks with the least
    to do that have room (Graham 1969)."""
    room, sizes = room_for(sum(lengths), ranks), block_sizes(ranks)

    def wanted(length: int) -> int:
        able = [size for size in sizes if -(-length // size) <= room]
        # Where none is fast enough, so many that more would hardly be faster.
        enough = max(limit, EVEN * min(costs.seconds(length, size) for size in able))
        return next(size for size in able if costs.seconds(length, size) <= enough)

    plan, chosen = DocumentPlan(ranks), {length: wanted(length) for length in set(lengths)}
    order = sorted(range(len(lengths)), key=lambda one: (-chosen[lengths[one]], -lengths[one], one))
    for document in order:
        length = lengths[document]
        for size in sizes[sizes.index(chosen[length]) :]:
            tokens = -(-length // size)
            space = plan.tokens.reshape(-1, size).max(1) + tokens <= room
            if space.any():
                break
        busy = np.where(space | ~space.any(), plan.seconds.reshape(-1, size).max(1), np.inf)
        place = Place(int(busy.argmin()) * size, size)
        plan.add(document, place, tokens, costs.seconds(length, size))
    return plan
