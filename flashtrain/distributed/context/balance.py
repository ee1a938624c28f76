"""The partition of a sequence among ranks: equal numbers of tokens, nearly equal work.

Tokens are assigned in pieces: runs that end where a block or a long document ends. The most
expensive piece is assigned first; every piece goes to the rank with the least work that has room
(Graham's longest processing time rule, 1969; for packed documents: Zeppelin, arXiv 2509.21841, and
MagiAttention, arXiv 2505.13211). Pieces that contain parts of the same document stay on one rank as
long as the work stays even; the longest documents are divided first.

The computation is integer arithmetic on the host in a fixed order, so that every rank
computes the same partition.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

# Pieces stay together only if the slowest rank then has at most this multiple of the mean work.
EVEN = 1.04
MAX_UNIT = 8  # pieces that short documents may hold together: they hang together in chains
LOOSER_UNITS = (4, 2, 1)  # ... where more would be uneven; one piece at last, however even
# A piece and the one before: nothing, a short document, or one document holds them.
APART, SHARED, SAME = 0, 1, 2

Run = tuple[int, int]  # tokens begin .. end - 1 of a row


def assign(
    costs: np.ndarray,
    edges: np.ndarray,
    bonds: Sequence[np.ndarray],
    room: int,
    already: Sequence[int],
) -> tuple[list[list[Run]], list[int]]:
    """Assign one row's pieces (runs of tokens) to the ranks, so that all ranks
    have nearly equal work.

    Args:
        costs: (S,) integers, the number of keys that each token's query sees.
        edges: (pieces + 1,), the first token of each piece, then S.
        bonds: arrays (pieces,), one for each attempt: whether a piece goes to the rank of the
            piece before it (SAME), does so up to a limit of pieces (SHARED) or need not (APART).
            The first attempt with even work (is_even) is used, else the most even one.
        room: the most tokens that one rank may hold; ranks * room is at least S.
        already: (ranks,), the work of each rank from earlier rows of the batch.

    Returns:
        (the runs (begin, end) of each rank, ascending; the work of each rank,
        earlier rows included).
    """
    sums = np.concatenate(([0], np.cumsum(costs, dtype=np.int64)))
    tried = [(bond, MAX_UNIT) for bond in bonds] + [(bonds[-1], limit) for limit in LOOSER_UNITS]
    best: _Assignment | None = None
    for bond, limit in tried:
        attempt = _Assignment(sums, edges, room, already)
        attempt.assign(_units(edges, bond, limit))
        if best is None or max(attempt.work) < max(best.work):
            best = attempt
        if is_even(attempt.work):
            break
    assert best is not None
    return [sorted(runs) for runs in best.runs], best.work


def is_even(work: Sequence[int]) -> bool:
    """Return whether no rank has more than EVEN (1.04) times the mean work."""
    return max(work) * len(work) <= EVEN * sum(work)


def _units(edges: np.ndarray, bond: np.ndarray, limit: int) -> list[Run]:
    """Join pieces to the runs that are assigned as one: a piece joins the run before it if its
    bond is SAME, or if it is SHARED and the run has fewer than `limit` pieces."""
    units: list[Run] = []
    pieces = 0
    for begin, end, tie in zip(edges[:-1].tolist(), edges[1:].tolist(), bond.tolist(), strict=True):
        if units and (tie == SAME or (tie == SHARED and pieces < limit)):
            units[-1] = units[-1][0], end
            pieces += 1
        else:
            units.append((begin, end))
            pieces = 1
    return units


class _Assignment:
    """The state of one greedy attempt; sums (S + 1,): the sum of the costs before each token."""

    def __init__(
        self, sums: np.ndarray, edges: np.ndarray, room: int, already: Sequence[int]
    ) -> None:
        self.sums, self.edges, self.room = sums, edges, room
        self.work = list(already)
        self.space = [room] * len(already)
        self.runs: list[list[Run]] = [[] for _ in already]

    def assign(self, units: Sequence[Run]) -> None:
        """Assign units, the most expensive first; a unit that no rank has room for is divided into
        its pieces, and such a piece into two runs."""
        queue = [self._entry(*unit) for unit in units]
        heapq.heapify(queue)
        while queue:
            _, begin, end = heapq.heappop(queue)
            rank = self._least(end - begin)
            if rank is not None:
                self._give(rank, begin, end)
                continue
            low, high = np.searchsorted(self.edges, (begin, end), side="right")
            inner = [edge for edge in self.edges[low:high].tolist() if edge < end]
            if inner:
                for piece in zip([begin, *inner], [*inner, end], strict=True):
                    heapq.heappush(queue, self._entry(*piece))
                continue
            rank = self._least(1)
            assert rank is not None  # all ranks together have room
            cut = begin + self.space[rank]
            self._give(rank, begin, cut)
            heapq.heappush(queue, self._entry(cut, end))

    def _entry(self, begin: int, end: int) -> tuple[int, int, int]:
        return -int(self.sums[end] - self.sums[begin]), begin, end

    def _least(self, tokens: int) -> int | None:
        """The rank with the least work that has room for so many tokens."""
        able = [rank for rank, space in enumerate(self.space) if space >= tokens]
        return min(able, key=lambda rank: (self.work[rank], rank), default=None)

    def _give(self, rank: int, begin: int, end: int) -> None:
        self.runs[rank].append((begin, end))
        self.work[rank] += int(self.sums[end] - self.sums[begin])
        self.space[rank] -= end - begin
