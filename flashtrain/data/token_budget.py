"""Plan which samples the rows of each step hold: rows of a token budget, filled and balanced step by step.

All samples of all epochs form one stream, each epoch in its own order. A step takes as many samples from the front of
the stream as its rows can hold, and those that fill the rows best from a little further on; samples that it skips come
first in the next step. So every sample is used exactly once per epoch, though an epoch's last rows may hold the first
samples of the next one.

The plan follows from the lengths alone, so every device computes the same plan without communication.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flashtrain.data.balance import Cost, share_out
from flashtrain.data.loader import latest_orders
from flashtrain.errors import at_least


class PlanState(NamedTuple):
    """The state between two steps: the next number of the stream, and the earlier numbers that are not used yet."""

    next_number: int = 0
    waiting: tuple[int, ...] = ()

    @property
    def used(self) -> int:
        """Samples used so far."""
        return self.next_number - len(self.waiting)


class TokenBudgetPlan:
    """Makes the rows of one step after the other. `state` is the place in the stream, and may be set.

    Args:
        lengths: (samples,) integers, tokens of an epoch's samples.
        budget: Tokens of a row.
        rows: Rows of a step, over all micro-batches and devices.
        cost: Cost of a sequence, by which rows are balanced.
        most: Maximum number of sequences in a row (None: any).
        look_ahead: How many steps' worth of tokens are searched for samples that fit.
        tolerance: See balance.share_out.

    Raises UserError: a number is below 1, or a sample is longer than the budget.
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
        """The samples of each row of the next step, as epoch * samples + sample. Advances the state."""
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
        """Numbers of the stream, waiting ones first, and their samples: at least as many tokens as are searched."""
        numbers = np.array(self.state.waiting, dtype=np.int64)
        places = self._places(numbers)
        wanted = self.look_ahead * self.rows * self.budget - int(self._sizes(places).sum())
        first = self.state.next_number
        while wanted > 0 or not len(numbers):
            # Up to the end of the epoch, and at most the numbers needed if every sample had one token.
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
        """The samples of these numbers of the stream, as epoch * samples + sample."""
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
    """Rows of an evaluation that hold every sample exactly once, as many for each rank; some of the last are empty.

    lengths: (n,) tokens of the samples in order. Returns [micro-batch][rank], tuples of sample numbers.
    """
    waiting = np.arange(len(lengths))
    batches = []
    while len(waiting):
        shared = share_out(lengths[waiting], cost or Cost(), bins=ranks, budget=budget, most=most, tolerance=np.inf)
        batches.append([tuple(waiting[row.members].tolist()) for row in shared])
        used = np.concatenate([row.members for row in shared]).astype(np.int64)
        waiting = np.delete(waiting, used)
    return batches
