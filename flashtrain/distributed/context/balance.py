"""Dealing blocks of a sequence to ranks: equal numbers of blocks, nearly equal work.

A block is a run of `block` tokens that begins at a multiple of it, so that a kernel's tile never joins far-apart
tokens. Blocks are dealt the dearest first, each to the rank with the least work so far that has room (Graham's longest
processing time rule, 1969; for packed documents: Zeppelin, arXiv 2509.21841, and MagiAttention, arXiv 2505.13211).
Blocks of one document stay together as long as the work stays even: as many documents as possible, the shorter before
the longer. Those that share a short document, too.

Everything is integer arithmetic on the host, in a fixed order: every rank computes the same plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Blocks stay together only where the slowest rank then has at most so much more work than the mean. At 1.02 ranks would
# have to fetch up to 2.5 times as many keys (documents of log-normal lengths, 131,072 to 524,288 tokens).
EVEN = 1.04
LONGEST_UNIT = 8  # blocks that short documents may hold together: they hang together in chains
LOOSER_UNITS = (4, 2, 1)  # ... where more would be uneven; one block at last, however even
APART, SHARED, SAME = 0, 1, 2  # a block and the one before: nothing, a short document, or one document holds them


class Unit(NamedTuple):
    """Blocks first .. first + blocks - 1 of a row, dealt together."""

    first: int
    blocks: int
    cost: int


def deal(costs: np.ndarray, bonds: Sequence[np.ndarray], already: Sequence[int]) -> list[list[int]]:
    """The blocks of each rank, ascending: at most ceil(blocks / ranks) each.

    costs: (blocks,) integers. bonds: (blocks,) each: APART, SHARED or SAME, what holds a block to the one before it;
    the first under which the work is even is taken, and of the last, the weakest, as much as leaves it even.
    already: (ranks,) the work that each rank has from elsewhere (earlier rows of the batch).
    """
    ranks = len(already)
    room = -(-len(costs) // ranks)
    tried = [(bond, LONGEST_UNIT) for bond in bonds] + [(bonds[-1], limit) for limit in LOOSER_UNITS]
    for bond, limit in tried:
        dealt, loads = _deal_units(_units(costs, bond, limit), costs, room, already)
        if max(loads) * ranks <= EVEN * sum(loads) or not bond.any():
            break
    return dealt


def _units(costs: np.ndarray, bond: np.ndarray, limit: int) -> list[Unit]:
    units: list[Unit] = []
    for index, (cost, held) in enumerate(zip(costs.tolist(), bond.tolist(), strict=True)):
        last = units[-1] if units else None
        if last is not None and (held == SAME or (held == SHARED and last.blocks < limit)):
            units[-1] = Unit(last.first, last.blocks + 1, last.cost + cost)
        else:
            units.append(Unit(index, 1, cost))
    return units


def _deal_units(
    units: list[Unit], costs: np.ndarray, room: int, already: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """room: blocks that a rank may hold."""
    ranks = len(already)
    blocks: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(work, rank) for rank, work in enumerate(already)]
    heapq.heapify(heap)
    # Dearest first; a unit that fits nowhere whole comes back as its blocks.
    queue = [(-unit.cost, unit.first, unit.blocks) for unit in units]
    heapq.heapify(queue)
    while queue:
        cost, first, count = heapq.heappop(queue)
        passed = []
        while heap and len(blocks[heap[0][1]]) + count > room:
            passed.append(heapq.heappop(heap))
        if heap:
            work, rank = heap[0]
            blocks[rank].extend(range(first, first + count))
            heapq.heapreplace(heap, (work - cost, rank))
        else:
            for index in range(first, first + count):
                heapq.heappush(queue, (-int(costs[index]), index, 1))
        for entry in passed:
            heapq.heappush(heap, entry)
    loads = [0] * ranks
    for work, rank in heap:
        loads[rank] = work
    return [sorted(each) for each in blocks], loads
