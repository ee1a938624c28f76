"""One case measured: every baseline is started, then all are sampled in rounds, so that
drifting clocks favour none."""

from __future__ import annotations

import gc
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from flashtrain.errors import first_line
from flashtrain.folders.run_folder import FAILED, OUT_OF_MEMORY
from flashtrain.training.out_of_memory import is_out_of_memory
from flashtrain_recipes.harness.baseline import B, Case
from flashtrain_recipes.harness.clock import Clock
from flashtrain_recipes.harness.rows import NO_TIME, Row, empty_row

MIN_ROUNDS = 3
E = TypeVar("E", bound="Entry[Any]")
C = TypeVar("C", bound=Case)

Note = Callable[[str, str], None]  # called with what could not be measured: (title, reason)
Sample = dict[str, float]  # the measurements of one turn, by their columns


@dataclass(frozen=True)
class Effort:
    """Limits of the time that is spent on measuring one case. Times are those
    of time.monotonic()."""

    rounds: int  # how often each baseline is sampled
    steps: int = 1  # launches in one sample, for benchmarks of training steps
    # When the case's share of the time ends: later, only MIN_ROUNDS are completed.
    late: float = math.inf
    until: float = math.inf  # when the run's time ends: later, no baseline is started

    def is_late(self) -> bool:
        return time.monotonic() >= min(self.late, self.until)

    def is_over(self) -> bool:
        return time.monotonic() >= self.until


@dataclass
class Entry(Generic[B]):
    """One baseline that was started at the case, with the samples (measurements) of each of its
    parts, as "forward" and "backward"."""

    baseline: B
    # Of each part, as "forward", one a round.
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)  # the parts that failed and are not sampled again

    def medians(self, part: str) -> Sample:
        """Return {column: median over the part's samples}; the part must have samples."""
        columns = dict.fromkeys(key for sample in self.samples[part] for key in sample)
        return {
            key: statistics.median(one[key] for one in self.samples[part] if key in one)
            for key in columns
        }

    @property
    def is_measured(self) -> bool:
        """Whether every part has a sample or has failed."""
        return all(samples or part in self.failed for part, samples in self.samples.items())


class Turns(ABC, Generic[C, E]):
    """Measures one case by all baselines, in turns. A subclass says how a baseline
    is started and sampled.

    Args:
        effort: the limits on rounds and time.
        note: called as note(title, reason) for a baseline, or part of one, that
            could not be measured.
    """

    def __init__(
        self, case: C, *, device: torch.device, clock: Clock, seed: int, effort: Effort, note: Note
    ) -> None:
        self.case = case
        self.device = device
        self.clock = clock
        self.seed = seed
        self.effort = effort
        self.note = note
        self.entries: list[E] = []
        self.empty: list[Row] = []

    # ---------------------------------------------------------------- what a family says
    @abstractmethod
    def start(self, baseline: Any) -> None:
        """Make a baseline's first calls, and append an Entry to `entries`; its `samples` has an
        empty list for each part that is timed, such as "forward". May raise anything."""

    @abstractmethod
    def sample(self, entry: E, part: str, number: int) -> Sample | None:
        """Measure a part of an entry once, in round `number`, and return the sample; None: the
        part is not measured in this round. May raise anything."""

    @abstractmethod
    def rows_of(self, entry: E) -> list[Row]:
        """Return the result rows of a baseline, `entry`, of which at least one
        sample (a timing) was taken."""

    def begin(self) -> None:
        """Make what all baselines of the case share, such as inputs and a reference,
        before any is started."""

    def without(self, baseline: Any, part: str, status: str, reason: str | None) -> list[Row]:
        """Return the result rows that say why a baseline, or a part of one, was not measured.

        Args:
            part: the part, as "backward"; "" means the whole baseline.
            status, reason: the rows' columns "status" and "error", see rows.empty_row.
        """
        return [empty_row(baseline.columns(self.case), status, reason)]

    def refuses(self, baseline: Any) -> tuple[str, str] | None:
        """Return (status, reason) where the baseline must not be started at
        this case, else None."""
        if self.effort.is_over():
            return NO_TIME, "benchmark.max_seconds was reached before it was started"
        return None

    def begin_round(self, number: int) -> None:
        """Do what is needed before the samples of round `number`; by default nothing."""

    def goes_on(self, number: int) -> bool:
        """Return whether to begin round `number`, counted from 0; a round samples every entry
        once.

        When the case's share of the time is over, only the first MIN_ROUNDS rounds are begun;
        when the benchmark's whole time is over, none of them once every entry has a sample.
        """
        if number >= self.effort.rounds:
            return False
        if not self.effort.is_late():
            return True
        measured = all(entry.is_measured for entry in self.entries)
        return number < MIN_ROUNDS and not (self.effort.is_over() and measured)

    # ---------------------------------------------------------------- the same for all
    def run(self, baselines: Sequence[Any]) -> list[Row]:
        """Measure the baselines and return all rows; rows without measurements come last, and
        their status says why."""
        self.begin()
        for baseline in baselines:
            if not baseline.applies(self.case):
                continue
            reason = baseline.refuses(self.case)
            if reason is not None:
                self.note(baseline.title, reason)
                continue
            known = self.refuses(baseline)
            if known is not None:
                self.leave_out(baseline, "", *known)
            else:
                self.attempt(baseline, "", partial(self.start, baseline))
        self._rounds()
        return [
            row
            for entry in self.entries
            if any(entry.samples.values())
            for row in self.rows_of(entry)
        ] + self.empty

    def _rounds(self) -> None:
        number = 0
        while self.entries and self.goes_on(number):
            self.begin_round(number)
            for part in dict.fromkeys(part for entry in self.entries for part in entry.samples):
                first = number % len(self.entries)  # who begins moves on by one each round
                for entry in [*self.entries[first:], *self.entries[:first]]:
                    if part in entry.samples and part not in entry.failed:
                        self._turn(entry, part, number)
            number += 1

    def _turn(self, entry: E, part: str, number: int) -> None:
        def take() -> None:
            sample = self.sample(entry, part, number)
            entry.samples[part] += [] if sample is None else [sample]

        failure = self.guarded(entry.baseline, take)
        if failure is not None:
            entry.failed.add(part)
            if not entry.samples[part]:  # else what it gave until now counts
                self.leave_out(entry.baseline, part, *failure)

    def attempt(self, baseline: Any, part: str, do: Callable[[], object]) -> bool:
        """Call `do` for a part of a baseline, and return whether it succeeded; a failure is
        noted and becomes a row."""
        failure = self.guarded(baseline, do)
        if failure is not None:
            self.leave_out(baseline, part, *failure)
        return failure is None

    def leave_out(self, baseline: Any, part: str, status: str, reason: str | None) -> None:
        """Note that a part of a baseline was not measured, and add the rows that say so;
        arguments as for `without`."""
        words = [part, status if status != FAILED else "", reason or ""]
        self.note(baseline.title, ": ".join(word for word in words if word))
        self.empty += self.without(baseline, part, status, reason)

    def guarded(self, baseline: Any, do: Callable[[], object]) -> tuple[str, str | None] | None:
        """Call `do`, and return (status, reason) if it fails, else None. Raises where that
        left the GPU unusable."""
        try:
            with baseline.within():
                do()
            return None
        except Exception as error:  # noqa: BLE001 - other people's programs may raise anything; the others go on
            failure = (
                (OUT_OF_MEMORY, None) if is_out_of_memory(error) else (FAILED, first_line(error))
            )
        self.after_failure()
        gc.collect()  # what it had built refers to itself
        self.clock.free_cache()
        return failure

    def after_failure(self) -> None:
        """Free what a failed call has left in memory; by default nothing."""
