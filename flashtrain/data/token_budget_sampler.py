"""The sampler that assigns the rows of a TokenBudgetPlan to devices and
micro-batches, from any step on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from flashtrain.data.loader import StepSampler
from flashtrain.data.token_budget import PlanState, TokenBudgetPlan

# Planning one takes some milliseconds: the steps of longer epochs are estimated from these.
STEPS_COUNTED = 1000
STATES_SAVED = 256  # of the latest planned steps: more than workers read ahead


class TokenBudgetSampler(StepSampler):
    """Yields, for each micro-batch of a run, the index with which `samples[index]` is this device's
    batch of packed rows.

    TokenBudgetPlan fills each step's rows with samples up to their budget of tokens. A step has
    accumulate * world_size micro-batches of batch_size rows. Worker processes read batches ahead of
    training. The plan's states after the latest steps are therefore held in memory, and a
    checkpoint saves the state after the step trained last.

    Args:
        samples: Samples of different lengths, such as ChatSamples. The plan is made
            from their `lengths`, (n,) int64, and their method `micro_batches` assigns
            the rows of a step to devices.
        plan: Further arguments of TokenBudgetPlan by name.
        **options: Arguments of StepSampler.
    """

    def __init__(self, samples: Any, plan: dict[str, Any], **options: Any) -> None:
        super().__init__(len(samples), **options)
        self.rows = samples
        self.plan = TokenBudgetPlan(
            samples.lengths, rows=self.samples_per_step, seed=self.seed, **plan
        )
        self._states: dict[int, PlanState] = {0: self.plan.state}

    def __iter__(self) -> Iterator[Any]:
        step, first = divmod(self.begin, self.accumulate)
        self.plan.state = self.state_at(step)
        while step * self.accumulate < self.end:
            place = {"rank": self.rank, "world_size": self.num_replicas}
            mine = self.rows.micro_batches(self._next(step), batch_size=self.batch_size, **place)
            yield from mine[first : self.end - step * self.accumulate]
            step, first = step + 1, 0

    def steps_of(self, epochs: float) -> int:
        steps, wanted, before = 0, epochs * self.samples, self.plan.state
        while self.plan.state.used < wanted and steps < STEPS_COUNTED:
            self.plan.next_step()
            steps += 1
        used, self.plan.state = self.plan.state.used, before
        return steps if used >= wanted else math.ceil(steps * wanted / used)

    def first_number(self, step: int) -> int:
        return self.state_at(step).used

    def state_at(self, step: int) -> PlanState:
        """Return the plan's state before a step, by planning again from the nearest earlier step
        whose state is held."""
        known = max(s for s in self._states if s <= step)
        current = self.plan.state
        self.plan.state = self._states[known]
        for _ in range(known, step):
            self.plan.next_step()
        found, self.plan.state = self.plan.state, current
        return found

    def place(self, step: int) -> dict[str, Any]:
        state = self.state_at(step)
        return {"next_number": state.next_number, "waiting": list(state.waiting)}

    def continue_from(self, step: int, place: dict[str, Any]) -> None:
        self._states = {step: PlanState(place["next_number"], tuple(place["waiting"]))}

    def _next(self, step: int) -> list[tuple[int, ...]]:
        planned = self.plan.next_step()
        self._states[step + 1] = self.plan.state
        while len(self._states) > STATES_SAVED:
            # But not the first, from which all others can be planned again.
            del self._states[sorted(self._states)[1]]
        return planned
