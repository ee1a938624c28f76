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
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flashtrain.distributed.context.balance import EVEN
from flashtrain.distributed.context.document_costs import DocumentCosts
from flashtrain.distributed.context.group import block_sizes

ROOM = 1.25  # times the mean tokens of a rank: the most that one may hold
# Times the mean seconds of a rank: the most that a document may take on each of its ranks. The
# first limit whose plan is even is used, else the one with the fastest plan.
LIMITS = (EVEN, 0.75, 0.5, 0.25, 0.125, 0.06, 0.03, 1.5, 2.0, 4.0)


class Place(NamedTuple):
    """The neighboring ranks first .. first + ranks - 1."""

    first: int
    ranks: int


@dataclass
class DocumentPlan:
    """Which ranks hold each document, and what that makes for each rank."""

    places: dict[int, Place]  # of each document, by its number
    tokens: np.ndarray  # (ranks,) int64
    seconds: np.ndarray  # (ranks,) float64, of the documents alone

    @property
    def groups(self) -> list[Place]:
        """The ranks with which each rank shares documents, itself included."""
        groups = [Place(rank, 1) for rank in range(len(self.tokens))]
        for place in sorted(set(self.places.values()), key=lambda one: one.ranks):
            groups[place.first : sum(place)] = [place] * place.ranks
        return groups

    @property
    def held(self) -> np.ndarray:
        """The number of tokens that each rank computes, (ranks,) int64: the most in its group,
        to which the others are padded."""
        return np.array([self.tokens[one.first : sum(one)].max() for one in self.groups])

    def seconds_of(self, costs: DocumentCosts) -> np.ndarray:
        """Return the seconds of each rank, (ranks,), with padding and its group's exchange."""
        exchange = [costs.exchange(one.ranks) for one in self.groups]
        return self.seconds + (self.held - self.tokens) * costs.token + exchange


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
    room = room_for(sum(lengths), ranks)
    found: list[tuple[bool, float, DocumentPlan]] = []
    # Then within one machine where they fit, of which less is sent between machines.
    for most in (ranks, costs.near) if 1 < costs.near < ranks else (ranks,):
        for limit in LIMITS:
            plan = _planned(lengths, ranks, costs, room, limit * mean, most)
            slowest = float(plan.seconds_of(costs).max())
            found.append((bool(plan.tokens.max() > room), slowest, plan))
            if found[-1][:2] <= (False, EVEN * mean):
                return plan
    return min(found, key=lambda one: one[:2])[2]


def _planned(
    lengths: Sequence[int], ranks: int, costs: DocumentCosts, room: int, limit: float, most: int
) -> DocumentPlan:
    """Return the plan in which a document takes at most `limit` seconds on each of its ranks and is
    on at most so many, if that is possible: those of most ranks first, then the longest, each to
    the ranks with the least to do that have room (Graham 1969)."""
    sizes = block_sizes(ranks)

    def wanted(length: int) -> int:
        able = [size for size in sizes if -(-length // size) <= room]
        able = [size for size in able if size <= most] or able[:1]
        for size in able:
            if costs.seconds(length, size) <= limit:
                return size
        # None is fast enough: so many that more would hardly be faster.
        enough = EVEN * min(costs.seconds(length, size) for size in able)
        return next(size for size in able if costs.seconds(length, size) <= enough)

    plan = DocumentPlan({}, np.zeros(ranks, dtype=np.int64), np.zeros(ranks))
    chosen = {length: wanted(length) for length in set(lengths)}
    order = sorted(range(len(lengths)), key=lambda one: (-chosen[lengths[one]], -lengths[one], one))
    for document in order:
        length = lengths[document]
        for size in sizes[sizes.index(chosen[length]) :]:
            able = plan.tokens.reshape(-1, size).max(1) - (-length // size) <= room
            if able.any():
                break
        busy = plan.seconds.reshape(-1, size).max(1)
        first = int((np.where(able, busy, np.inf) if able.any() else busy).argmin()) * size
        own = slice(first, first + size)
        plan.places[document] = Place(first, size)
        plan.tokens[own] += -(-length // size)
        plan.seconds[own] += costs.seconds(length, size) - costs.exchange(size)
    return plan
