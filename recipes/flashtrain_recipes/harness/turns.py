"""One case measured: every baseline is started, then all take turns in rounds, so that drifting clocks favour none."""

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
from flashtrain.training.out_of_memory import is_out_of_memory
from flashtrain_recipes.harness.baseline import B, Case
from flashtrain_recipes.harness.clock import Clock
from flashtrain_recipes.harness.rows import FAILED, NO_TIME, OUT_OF_MEMORY, Row, empty_row

MIN_ROUNDS = 3
E = TypeVar("E", bound="Entry[Any]")
C = TypeVar("C", bound=Case)

Note = Callable[[str, str], None]  # called with what could not be measured: (title, reason)
Sample = dict[str, float]  # the figures of one turn, by their columns


@dataclass(frozen=True)
class Effort:
    """How much is measured of a case.

    Attributes:
        rounds: turns of each baseline.
        steps: launches of a turn, where that has several.
        late: a moment of time.monotonic(), the end of the case's share of the time: no further round is begun.
        until: the end of all time: nothing is begun.
    """

    rounds: int
    steps: int = 1
    late: float = math.inf
    until: float = math.inf

    def is_late(self) -> bool:
        return time.monotonic() >= min(self.late, self.until)

    def is_over(self) -> bool:
        return time.monotonic() >= self.until


@dataclass
class Entry(Generic[B]):
    """One baseline at the case, started.

    Attributes:
        samples: {part: [{column: figure}, one of each turn]}.
        failed: parts that have no further turns.
    """

    baseline: B
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def medians(self, part: str) -> Sample:
        """Return the median of each column of a part that has samples."""
        columns = dict.fromkeys(key for sample in self.samples[part] for key in sample)
        return {key: statistics.median(one[key] for one in self.samples[part] if key in one) for key in columns}

    @property
    def is_measured(self) -> bool:
        """Every part has a figure, or never will have one."""
        return all(samples or part in self.failed for part, samples in self.samples.items())


class Turns(ABC, Generic[C, E]):
    """One case on one device.

    Args:
        note: called with what could not be measured.
    """

    def __init__(self, case: C, *, device: torch.device, clock: Clock, seed: int, effort: Effort, note: Note) -> None:
        self.case, self.device, self.clock, self.seed, self.effort, self.note = case, device, clock, seed, effort, note
        self.entries: list[E] = []
        self.empty: list[Row] = []

    # ---------------------------------------------------------------- what a family says
    @abstractmethod
    def start(self, baseline: Any) -> None:
        """Make first calls, and an entry whose samples have a key for each part to sample. May raise anything."""

    @abstractmethod
    def sample(self, entry: E, part: str, number: int) -> Sample | None:
        """Take one turn of a part, in round `number`; None: it is skipped. May raise anything."""

    @abstractmethod
    def rows_of(self, entry: E) -> list[Row]:
        """Return the rows of an entry that has samples."""

    def begin(self) -> None:
        """Make what the case needs before any baseline: inputs, a reference."""

    def without(self, baseline: Any, part: str, status: str, reason: str | None) -> list[Row]:
        """Return the rows of what has no figure.

        Args:
            part: what has none; "": all of the baseline.
        """
        return [empty_row(baseline.columns(self.case), status, reason)]

    def refuses(self, baseline: Any) -> tuple[str, str] | None:
        """Return (status, reason) of a baseline that is not to be started, known beforehand."""
        return (NO_TIME, "benchmark.max_seconds leave no time for it") if self.effort.is_over() else None

    def begin_round(self, number: int) -> None:
        """Do what precedes the turns of a round."""

    def goes_on(self, number: int) -> bool:
        """Whether round `number` is begun. Late, MIN_ROUNDS are still made, or every entry gets one figure."""
        if number >= self.effort.rounds:
            return False
        if not self.effort.is_late():
            return True
        measured = all(entry.is_measured for entry in self.entries)
        return number < MIN_ROUNDS and not (self.effort.is_over() and measured)

    # ---------------------------------------------------------------- the same for all
    def run(self, baselines: Sequence[Any]) -> list[Row]:
        """Measure the baselines, and return the rows; those without figures come last, and their status says why."""
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
            row for entry in self.entries if any(entry.samples.values()) for row in self.rows_of(entry)
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
        """Call `do` for a part of the baseline, and return whether it worked; a failure is noted and is a row."""
        failure = self.guarded(baseline, do)
        if failure is not None:
            self.leave_out(baseline, part, *failure)
        return failure is None

    def leave_out(self, baseline: Any, part: str, status: str, reason: str | None) -> None:
        """Note why a part has no figure, and add the rows that say so."""
        words = [part, status if status != FAILED else "", reason or ""]
        self.note(baseline.title, ": ".join(word for word in words if word))
        self.empty += self.without(baseline, part, status, reason)

    def guarded(self, baseline: Any, do: Callable[[], object]) -> tuple[str, str | None] | None:
        """Call `do`; return (status, reason) of a failure, or None. Raises where that has broken the GPU."""
        try:
            with baseline.within():
                do()
            return None
        except Exception as error:  # noqa: BLE001 - other people's programs may raise anything; the others go on
            failure = (OUT_OF_MEMORY, None) if is_out_of_memory(error) else (FAILED, first_line(error))
        self.after_failure()
        gc.collect()  # what it had built refers to itself
        self.clock.settle()
        return failure

    def after_failure(self) -> None:
        """Free what a failed call has left."""
