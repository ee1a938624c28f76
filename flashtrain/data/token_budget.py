"""Plan which samples the rows of each step hold: at most a budget of tokens in a row, and rows of
about equal cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from flashtrain.data.balance import BY_TOKENS, Cost, share_out
from flashtrain.data.loader import in_epoch_order


class PlanState(NamedTuple):
    """The place of a TokenBudgetPlan in its stream of samples, between two steps."""

    next_number: int = 0  # of the stream
    waiting: tuple[int, ...] = ()  # earlier numbers that are not used yet

    @property
    def used(self) -> int:
        """The number of samples used so far."""
        return self.next_number - len(self.waiting)


@dataclass(eq=False)
class TokenBudgetPlan:
    """Plans the rows of one step after the other from the samples' lengths, so that all
    devices plan the same rows.

    All samples of all epochs form one stream, each epoch in its own order. A step takes as
    many samples from the front of the stream as its rows can hold, and those that fill the
    rows best from a little further on; samples that it skips come first in the next step. So
    every sample is used exactly once per epoch, though an epoch's last rows may hold the
    first samples of the next one.
    """

    lengths: np.ndarray  # (samples,) integers, tokens of an epoch's samples
    budget: int  # tokens of a row
    rows: int  # of a step, over all micro-batches and devices
    cost: Cost = BY_TOKENS  # of a sequence, by which rows are balanced
    max_sequences: int | None = None  # in a row; None: any number
    seed: int = 0  # of the order of samples
    look_ahead: float = 2.0  # how many steps' worth of tokens are searched for samples that fit
    tolerance: float = 1.03  # see balance.share_out
    state: PlanState = field(default_factory=PlanState)  # the place in the stream, which may be set

    def next_step(self) -> list[tuple[int, ...]]:
        """Plan the next step: return the samples of each row, as epoch * samples + sample,
        and advance the state."""
        numbers, places = self._window()
        shared = share_out(
            self._sizes(places),
            self.cost,
            bins=self.rows,
            budget=self.budget,
            max_sequences=self.max_sequences,
            tolerance=self.tolerance,
        )
        used = np.zeros(len(numbers), dtype=bool)
        for row in shared:
            used[row.members] = True
        following = max(self.state.next_number, int(numbers[used].max()) + 1)
        left = numbers[~used & (numbers < following)]
        self.state = PlanState(following, tuple(left.tolist()))
        return [tuple(places[row.members].tolist()) for row in shared]

    def _window(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers in the stream from which a step is chosen, waiting ones first, and
        epoch * samples + sample of each. They hold at least look_ahead steps of tokens."""
        numbers = np.array(self.state.waiting, dtype=np.int64)
        places = self._places(numbers)
        wanted = self.look_ahead * self.rows * self.budget - int(self._sizes(places).sum())
        first = self.state.next_number
        while wanted > 0 or not len(numbers):
            # Up to the end of the epoch, and at most the numbers needed if every
            # sample had one token.
            last = min(
                (first // len(self.lengths) + 1) * len(self.lengths), first + max(1, int(wanted))
            )
            more = np.arange(first, last)
            more_places = self._places(more)
            enough = int(np.searchsorted(self._sizes(more_places).cumsum(), max(1, wanted))) + 1
            more, more_places = more[:enough], more_places[:enough]
            numbers, places = np.concatenate((numbers, more)), np.concatenate((places, more_places))
            wanted -= int(self._sizes(more_places).sum())
            first = int(more[-1]) + 1
        return numbers, places

    def _places(self, numbers: np.ndarray) -> np.ndarray:
        samples = len(self.lengths)
        return numbers // samples * samples + in_epoch_order(numbers, samples, self.seed)

    def _sizes(self, places: np.ndarray) -> np.ndarray:
        return self.lengths[places % len(self.lengths)]


def rows_once(
    lengths: np.ndarray,
    *,
    budget: int,
    ranks: int,
    cost: Cost = BY_TOKENS,
    max_sequences: int | None = None,
) -> list[list[tuple[int, ...]]]:
    """Plan the rows of an evaluation, which hold every sample exactly once.

    Args:
        lengths: (n,) integers, tokens of the samples in order.
        ranks: Number of devices; all get the same number of rows, of which some of
            the last may be empty.
        budget, cost, max_sequences: See TokenBudgetPlan.

    Returns:
        For each micro-batch and each rank a row, as a tuple of sample numbers.
    """
    waiting = np.arange(len(lengths))
    batches = []
    while len(waiting):
        shared = share_out(
            lengths[waiting],
            cost,
            bins=ranks,
            budget=budget,
            max_sequences=max_sequences,
            tolerance=np.inf,
        )
        batches.append([tuple(waiting[row.members].tolist()) for row in shared])
        used = np.concatenate([row.members for row in shared]).astype(np.int64)
        waiting = np.delete(waiting, used)
    return batches
