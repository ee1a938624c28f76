"""The grid on all ranks at once: case after case, and what the first rank has to tell of each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flashtrain_recipes.attention_benchmark.measure import Row
from flashtrain_recipes.attention_benchmark.settings import BenchmarkSettings
from flashtrain_recipes.context_benchmark.case import ContextCase, cases
from flashtrain_recipes.context_benchmark.contenders import Contender, our_contenders
from flashtrain_recipes.context_benchmark.measure import Measurement, RanOut
from flashtrain_recipes.context_benchmark.one_device import Rates
from flashtrain_recipes.context_benchmark.peers import peers
from flashtrain_recipes.context_benchmark.ranks import World


@dataclass
class Job:
    """What every rank is given. kind: "cuda" or "cpu". until: the moment of time.time() after which no case is begun.

    first: number of the case to begin with. skipped: {case number: titles of contenders that ran out of memory there}.
    rates: what one device has reached in earlier cases.
    """

    asked: BenchmarkSettings
    kind: str
    size: int
    degrees: list[int]
    seed: int
    until: float | None = None
    first: int = 0
    skipped: dict[int, list[str]] = field(default_factory=dict)
    rates: Rates = field(default_factory=Rates)

    def cases(self) -> list[ContextCase]:
        return cases(self.asked, self.degrees)

    def divisions(self) -> dict[int, list[int]]:
        """{degree: the numbers of ranks that divide the heads, of cases for which the hybrid way is one}."""
        found: dict[int, set[int]] = {degree: set() for degree in self.degrees}
        for case in self.cases():
            shared = math.gcd(case.attention.heads, case.degree)
            found[case.degree] |= {shared} if 1 < shared < case.degree else set()
        return {degree: sorted(of) for degree, of in found.items()}

    def contenders(self) -> tuple[list[Contender], dict[str, str]]:
        """(those that can be had, {title of each that cannot: why})."""
        return choose_contenders(self.asked, self.kind)


class Event(NamedTuple):
    """What the first rank tells. kind: "case" (begun), "note" (told: title and reason), "rows" (of the case)."""

    kind: str
    case: int
    told: Any = None


def choose_contenders(asked: BenchmarkSettings, kind: str) -> tuple[list[Contender], dict[str, str]]:
    """(the contenders that benchmark.implementations, ways and layouts name, {way of each that is missing: why})."""
    everyone = [*our_contenders(asked.ways, asked.layouts), *peers()]
    chosen = [one for one in everyone if asked.implementations is None or one.name in asked.implementations]
    missing = {one.way: reason for one in chosen if (reason := one.missing(kind)) is not None}
    return [one for one in chosen if one.way not in missing], missing


class OutOfMemoryAt(Exception):
    """A rank ran out of memory at a case (its number) with a contender (its title)."""

    def __init__(self, case: int, title: str, line: str) -> None:
        super().__init__(line)
        self.case, self.title = case, title


def measured(job: Job, world: World, mark: Callable[[str], None]) -> Iterator[Event]:
    """Measure the cases of the job; every rank goes through it, the first one's events tell what was found.

    mark: called with what this rank does now. Raises OutOfMemoryAt on the rank that ran out of memory.
    """
    contenders, _ = job.contenders()
    todo = job.cases()
    for number in range(job.first, len(todo)):
        now = time.time()
        share = None if job.until is None else (job.until - now) / (len(todo) - number)
        share = world.told_by_first(share)
        if share is not None and share <= 0 and number > 0:  # something is measured, however long starting took
            return
        team = world.teams.get(todo[number].degree)
        if team is None:
            continue
        if world.rank == 0:
            yield Event("case", number)
        notes = _Notes()
        measurement = Measurement(
            todo[number], team, job.asked, seed=job.seed + number, mark=mark, rates=job.rates,
            note=notes,
        )  # fmt: skip
        try:
            rows: list[Row] = measurement.run(contenders, _skipped(job.skipped, number), share)
        except RanOut as error:
            raise OutOfMemoryAt(number, error.title, f"{todo[number]}, {error}") from error
        del measurement
        if world.rank == 0:
            for note in notes.kept:
                yield Event("note", number, note)
            yield Event("rows", number, rows)


class _Notes:
    """Keeps what a case's measurement notes."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, str]] = []

    def __call__(self, title: str, reason: str) -> None:
        if (title, reason) not in self.kept:  # a way is refused alike in every layout
            self.kept.append((title, reason))


def _skipped(skipped: Mapping[int, Sequence[str]], number: int) -> Sequence[str]:
    return skipped.get(number, ())
