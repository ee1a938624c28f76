"""Reading a TokenBudgetPlan: which row each device builds in each micro-batch, from whatever step a run stands at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from flashtrain.data.loader import StepSampler
from flashtrain.data.token_budget import PlanState, TokenBudgetPlan

STATES_KEPT = 256  # of the latest steps planned: more than workers read ahead


class BudgetSamples(Protocol):
    """What rows are made of. Indexed by one of its micro-batches it gives a batch."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray:
        """(n,) int64: tokens of each sample."""
        ...

    def micro_batches(
        self, rows: Sequence[tuple[int, ...]], *, rank: int, world_size: int, batch_size: int
    ) -> list[Any]:
        """This device's micro-batches of a step of these rows, each a list of sample numbers, in their order."""
        ...


class TokenBudgetSampler(StepSampler):
    """Hands out, for each micro-batch of a run, what this device builds it of (of MaskedSamples a Row).

    options: a StepSampler's; plan: see TokenBudgetPlan. A step has accumulate * world_size micro-batches of batch_size
    rows; samples say whose each row is. The plan is made ahead of the run by what worker processes read ahead, so where
    it stood after each of the latest steps is kept.
    """

    def __init__(self, samples: BudgetSamples, plan: dict[str, Any], **options: Any) -> None:
        super().__init__(len(samples), **options)
        self.rows = samples
        self.plan = TokenBudgetPlan(samples.lengths, rows=self.samples_per_step, seed=self.seed, **plan)
        self._states: dict[int, PlanState] = {0: self.plan.state}

    def __iter__(self) -> Iterator[Any]:
        end = self.begin + len(self) if self.end is None else self.end
        step, first = divmod(self.begin, self.accumulate)
        self.plan.state = self.state_at(step)
        while step * self.accumulate < end:
            place = {"rank": self.rank, "world_size": self.num_replicas}
            mine = self.rows.micro_batches(self._next(step), batch_size=self.batch_size, **place)
            yield from mine[first : end - step * self.accumulate]
            step, first = step + 1, 0

    def first_number(self, step: int) -> int:
        return self.state_at(step).used

    def state_at(self, step: int) -> PlanState:
        """Where the plan stands before a step. It is planned again from the nearest earlier step that is known."""
        known = max(s for s in self._states if s <= step)
        kept = self.plan.state
        self.plan.state = self._states[known]
        for _ in range(known, step):
            self.plan.next_step()
        found, self.plan.state = self.plan.state, kept
        return found

    def place(self, step: int) -> dict[str, Any]:
        state = self.state_at(step)
        return {"next_number": state.next_number, "waiting": list(state.waiting)}

    def continue_from(self, step: int, place: dict[str, Any]) -> None:
        self._states = {step: PlanState(place["next_number"], tuple(place["waiting"]))}

    def _next(self, step: int) -> list[tuple[int, ...]]:
        planned = self.plan.next_step()
        self._states[step + 1] = self.plan.state
        while len(self._states) > STATES_KEPT:
            del self._states[sorted(self._states)[1]]  # not the first, from which all can be planned again
        return planned
