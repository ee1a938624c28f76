"""Which samples each row of a run holds: rows of a budget of tokens, filled and evened out step by step.

All samples of all epochs form one stream, each epoch in an order of its own. A step takes what its rows can hold from
the front of the stream, and what fills them best from a little further on; what it leaves comes first in the next step.
So every sample is used exactly once an epoch, though an epoch's last rows may hold the next one's first samples.

Everything follows from the lengths, so every device computes the same plan and reads its own rows of it: no samples are
exchanged, and no messages either.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flashtrain.data.balance import Cost, share_out
from flashtrain.data.loader import latest_orders
from flashtrain.errors import at_least


class PlanState(NamedTuple):
    """A place between two steps: the next number of the stream, and the earlier ones that are not used yet."""

    next_number: int = 0
    waiting: tuple[int, ...] = ()

    @property
    def used(self) -> int:
        """Samples used so far."""
        return self.next_number - len(self.waiting)


class TokenBudgetPlan:
    """Makes the rows of one step after the other; `state` is where it stands, and may be set.

    lengths: of an epoch's samples, (samples,) integers. budget: tokens a row. rows: of a step,
    over all micro-batches and devices. cost: of a sequence, by which rows are evened. most: sequences a row may hold.
    seed: of the order. look_ahead: how many steps' worth of tokens are looked through for what fits.
    tolerance: see balance.share_out. UserError: numbers below 1, a sample longer than the budget.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        budget: int,
        rows: int,
        cost: Cost | None = None,
        most: int | None = None,
        seed: int = 0,
        look_ahead: float = 2.0,
        tolerance: float = 1.03,
    ) -> None:
        self.samples = len(lengths)
        for name, value in (("samples", self.samples), ("budget", budget), ("rows", rows)):
            at_least(name, value, 1)
        self.lengths = lengths
        self.budget = budget
        self.rows = rows
        self.cost = cost or Cost()
        self.most = most
        self.seed = seed
        self.look_ahead = look_ahead
        self.tolerance = tolerance
        self.state = PlanState()

    def next_step(self) -> list[tuple[int, ...]]:
        """The samples of each row of the next step, as epoch * samples + sample; the state moves on."""
        numbers, places = self._window()
        sizes = self._sizes(places)
        shared = share_out(
            sizes, self.cost, bins=self.rows, budget=self.budget, most=self.most, tolerance=self.tolerance
        )
        used = np.zeros(len(numbers), dtype=bool)
        for row in shared:
            used[row.members] = True
        following = max(self.state.next_number, int(numbers[used].max()) + 1)
        left = numbers[~used & (numbers < following)]
        self.state = PlanState(following, tuple(left.tolist()))
        return [tuple(places[row.members].tolist()) for row in shared]

    def _window(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the stream, those waiting first, and their samples: at least the tokens to be looked through."""
        numbers = np.array(self.state.waiting, dtype=np.int64)
        places = self._places(numbers)
        wanted = self.look_ahead * self.rows * self.budget - int(self._sizes(places).sum())
        first = self.state.next_number
        while wanted > 0 or not len(numbers):
            # To the end of the epoch, and no more numbers than can be needed: a sample has at least one token.
            last = min((first // self.samples + 1) * self.samples, first + max(1, int(wanted)))
            more = np.arange(first, last)
            more_places = self._places(more)
            enough = int(np.searchsorted(self._sizes(more_places).cumsum(), max(1, wanted))) + 1
            more, more_places = more[:enough], more_places[:enough]
            numbers, places = np.concatenate((numbers, more)), np.concatenate((places, more_places))
            wanted -= int(self._sizes(more_places).sum())
            first = int(more[-1]) + 1
        return numbers, places

    def _places(self, numbers: np.ndarray) -> np.ndarray:
        """The samples, as epoch * samples + sample, that the stream's numbers stand for."""
        epochs, at = np.divmod(numbers, self.samples)
        places = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            order = latest_orders(self.samples, self.seed, int(epoch))
            places[of_epoch] = epoch * self.samples + order[at[of_epoch]].astype(np.int64)
        return places

    def _sizes(self, places: np.ndarray) -> np.ndarray:
        return self.lengths[places % self.samples]


def rows_once(
    lengths: np.ndarray, *, budget: int, ranks: int, cost: Cost | None = None, most: int | None = None
) -> list:
    """Rows that hold every sample exactly once, as many for each rank: for an evaluation. Some of the last are empty.

    lengths: (n,), of the samples in order. Returns [micro-batch][rank] of tuples of sample numbers.
    """
    waiting = np.arange(len(lengths))
    batches = []
    while len(waiting):
        shared = share_out(lengths[waiting], cost or Cost(), bins=ranks, budget=budget, most=most, tolerance=np.inf)
        batches.append([tuple(waiting[row.members].tolist()) for row in shared])
        used = np.concatenate([row.members for row in shared]).astype(np.int64)
        waiting = np.delete(waiting, used)
    return batches
