"""Balance the sequences of a step over micro-batches and devices, by tokens and by compute.

Sources: Zeng et al. 2022, "Boosting Distributed Training Performance of the Unpadded BERT Model",
arXiv 2208.08124, who exchange samples between devices; here rows are planned from lengths. Chen et
al. 2025, "Zeppelin", arXiv 2509.21841.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import numpy as np

COST_OF = attrgetter("cost")


class Cost(NamedTuple):
    """The cost of a sequence, per_token * length + per_pair * length^2, in any unit
    (BertConfig uses FLOPs).

    Attention costs the square of a sequence's length and all else costs its length, so equal
    tokens are not equal work.
    """

    per_token: float = 1.0
    per_pair: float = 0.0

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """Return the cost of each sequence, (n,) float64, from its length, (n,)."""
        exact = np.asarray(lengths, dtype=np.float64)
        return self.per_token * exact + self.per_pair * exact * exact


BY_TOKENS = Cost()


@dataclass(eq=False)
class Bin:
    """A row (one device's micro-batch) while it is filled: its sequences, and the sums of their
    tokens and costs."""

    members: list[int] = field(default_factory=list)  # indices in the list of waiting sequences
    tokens: int = 0
    cost: float = 0.0

    def put(self, member: int, tokens: int, cost: float) -> None:
        self.members.append(member)
        self.tokens += tokens
        self.cost += cost


def share_out(
    lengths: Sequence[int] | np.ndarray,
    cost: Cost,
    *,
    bins: int,
    budget: int,
    max_sequences: int | None = None,
    tolerance: float = 1.03,
) -> list[Bin]:
    """Assign waiting sequences to rows so that all rows cost about the same, and return the rows.

    First the oldest sequences, about as many as fit, are put one by one into the cheapest row that
    has room, the costliest sequence first (Graham 1969). Then the cheapest row takes the longest
    later sequence that fits (best fit), as long as its cost stays within `tolerance` of the mean.
    The oldest sequence is always used, so none waits for ever. No sequence is cut: a sequence that
    costs more than the mean row makes rows uneven. The result is deterministic.

    Args:
        lengths: (n,) tokens of each waiting sequence, at most `budget`, oldest first. Give more
            sequences than fit, or rows stay partly empty.
        cost: Cost of a sequence as a function of its length.
        bins: Number of rows.
        budget: Tokens of a row.
        max_sequences: Maximum number of sequences in a row (None: no limit).
        tolerance: Maximum ratio of a row's cost to the mean cost of all rows.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    assert not len(sizes) or sizes.max() <= budget
    costs = cost.of(sizes)
    max_sequences = len(sizes) if max_sequences is None else max_sequences
    rows = [Bin() for _ in range(bins)]
    body = _body(sizes, bins, budget)
    first = (
        np.argsort(-costs[1:body], kind="stable") + 1 if body > 1 else np.empty(0, dtype=np.int64)
    )
    order = [0, *first.tolist()] if body else []
    size_list, cost_list = sizes.tolist(), costs.tolist()
    left = []
    for member in order:
        room = budget - size_list[member]
        open_rows = [row for row in rows if row.tokens <= room and len(row.members) < max_sequences]
        if open_rows:
            min(open_rows, key=COST_OF).put(member, size_list[member], cost_list[member])
        else:
            left.append(member)
    _fill(
        [*left, *range(body, len(sizes))],
        size_list,
        cost_list,
        rows,
        budget,
        max_sequences,
        tolerance,
    )
    return rows


def _body(sizes: np.ndarray, bins: int, budget: int) -> int:
    """Return how many of the oldest sequences to assign first: as many as fit into all rows, less
    about one a row, for which `_fill` then chooses a later sequence."""
    if not len(sizes):
        return 0
    room = bins * max(0.0, budget - float(sizes.mean()))
    return max(1, int(np.searchsorted(sizes.cumsum(), room, side="right")))


def _fill(
    waiting: list[int],
    sizes: list[int],
    costs: list[float],
    rows: list[Bin],
    budget: int,
    max_sequences: int,
    tolerance: float,
) -> None:
    """Put the longest waiting sequence that fits into the cheapest row, again and again, until no
    sequence fits into any row."""
    # Ascending by length; of equal lengths the oldest last, where it is taken first.
    by_length = sorted(waiting, key=lambda member: (sizes[member], -member))
    keys = [sizes[member] for member in by_length]
    total = sum(row.cost for row in rows)
    open_rows = list(rows)
    while open_rows and keys:
        row = min(open_rows, key=COST_OF)
        place = bisect.bisect_right(keys, budget - row.tokens) - 1
        while place >= 0:
            cost = costs[by_length[place]]
            # The mean only grows from here on, so what is within the tolerance now stays within it.
            if row.cost + cost <= tolerance * (total + cost) / len(rows):
                break
            place = bisect.bisect_left(keys, keys[place]) - 1
        if place < 0 or len(row.members) >= max_sequences:
            open_rows.remove(row)  # nothing fits here any more
            continue
        member = by_length.pop(place)
        keys.pop(place)
        row.put(member, sizes[member], cost)
        total += cost
