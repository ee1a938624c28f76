"""Reading a TokenBudgetPlan: which row each device builds in each micro-batch, from whatever step a run stands at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import pytorch_lightning as pl
from torch.utils.data import DistributedSampler

from flashtrain.data.loader import ResumableLoader
from flashtrain.data.token_budget import PlanState, TokenBudgetPlan

STATES_KEPT = 256  # of the latest steps planned: more than workers read ahead


class BudgetSamples(Protocol):
    """What rows are made of. tokens: of all samples together. Indexed by one of its micro-batches it gives a batch."""

    @property
    def tokens(self) -> int: ...

    def __len__(self) -> int: ...

    def micro_batches(
        self, rows: Sequence[tuple[int, ...]], *, rank: int, world_size: int, batch_size: int
    ) -> list[Any]:
        """This device's micro-batches of a step of these rows, each a list of sample numbers, in their order."""
        ...


class TokenBudgetSampler(DistributedSampler):
    """Hands out, for each micro-batch of a run, what this device builds it of (of MaskedSamples a Row).

    plan: of accumulate * world_size micro-batches a step, each of batch_size rows; samples say whose each row is.
    `begin` is the micro-batch that the next iteration starts with, counted from the run's first. The plan is made ahead
    of the run by what worker processes read ahead, so where it stood after each of the latest steps is kept.
    Being a DistributedSampler tells Lightning that it already knows its rank, and is to be left alone.
    """

    def __init__(
        self,
        samples: BudgetSamples,
        plan: TokenBudgetPlan,
        *,
        total_steps: int,
        accumulate: int = 1,
        batch_size: int = 1,
        world_size: int = 1,
        rank: int = 0,
    ) -> None:
        super().__init__(range(len(samples)), num_replicas=world_size, rank=rank)  # type: ignore[arg-type]
        self.samples = samples
        self.plan = plan
        self.total_steps = total_steps
        self.accumulate = accumulate
        self.batch_size = batch_size
        self.begin = 0
        self.end: int | None = None
        self._states: dict[int, PlanState] = {0: plan.state}

    def __len__(self) -> int:
        return self.total_steps * self.accumulate

    def __iter__(self) -> Iterator[Any]:
        end = self.begin + len(self) if self.end is None else self.end
        step, first = divmod(self.begin, self.accumulate)
        self.plan.state = self.state_at(step)
        while step * self.accumulate < end:
            place = {"rank": self.rank, "world_size": self.num_replicas}
            mine = self.samples.micro_batches(self._next(step), batch_size=self.batch_size, **place)
            yield from mine[first : end - step * self.accumulate]
            step, first = step + 1, 0

    def state_at(self, step: int) -> PlanState:
        """Where the plan stands before a step. It is planned again from the nearest earlier step that is known."""
        known = max(s for s in self._states if s <= step)
        kept = self.plan.state
        self.plan.state = self._states[known]
        for _ in range(known, step):
            self.plan.next_step()
        found, self.plan.state = self.plan.state, kept
        return found

    def continue_from(self, step: int, state: PlanState) -> None:
        """Let this step begin at this place in the stream; what comes before it is forgotten."""
        self._states = {step: state}

    def set_epoch(self, epoch: int) -> None:
        """Nothing to set: the epoch follows from the step."""

    def _next(self, step: int) -> list[tuple[int, ...]]:
        planned = self.plan.next_step()
        self._states[step + 1] = self.plan.state
        while len(self._states) > STATES_KEPT:
            del self._states[sorted(self._states)[1]]  # not the first, from which all can be planned again
        return planned


class TokenBudgetLoader(ResumableLoader):
    """ResumableLoader of rows of a token budget: its place in the stream is the plan's state, not a sample number."""

    def __init__(
        self,
        samples: BudgetSamples,
        sampler: TokenBudgetSampler,
        *,
        trainer: pl.Trainer | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(
            cast(Any, samples), cast(Any, sampler), trainer=trainer, num_workers=num_workers, pin_memory=pin_memory
        )
        self.rows = sampler

    @property
    def samples_read(self) -> int:
        """Samples that the steps done have trained on, over all devices."""
        return self.rows.state_at(self.step).used

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream of samples, and what the stream was made of. Plain numbers, the same on all ranks."""
        state = self.rows.state_at(self.step)
        return {
            "step": self.step,
            "next_number": state.next_number,
            "waiting": list(state.waiting),
            "accumulate": self.rows.accumulate,
            "seed": self.rows.plan.seed,
            "samples": len(self.packed),
            "tokens": self.packed.tokens,
        }

    def _continue_from(self, state_dict: dict[str, Any]) -> None:
        place = PlanState(state_dict["next_number"], tuple(state_dict["waiting"]))
        self.rows.continue_from(state_dict["step"], place)
