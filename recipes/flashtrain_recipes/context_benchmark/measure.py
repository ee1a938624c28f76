"""One case on all ranks of its team: every contender is tried, then they take turns with one device.

All ranks call everything here at the same points. What one rank alone decides, it tells the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashtrain_recipes.attention_benchmark.inputs import Context, Inputs, make_sets
from flashtrain_recipes.attention_benchmark.reference import Expected, expected
from flashtrain_recipes.attention_benchmark.settings import BenchmarkSettings
from flashtrain_recipes.benchmark_runner.measuring import OUT_OF_MEMORY, Note, Row, clock_for, first_line, in_turn
from flashtrain_recipes.context_benchmark.contenders import (
    Attend,
    Contender,
    ContextCase,
    Place,
    gradients,
    leaves_of,
    only_communicating,
)
from flashtrain_recipes.context_benchmark.ranks import Team, TeamClock
from flashtrain_recipes.context_benchmark.rows import Found, OneDevice, Rates, errors_of_rank, failed_row, row_of

_COMMUNICATION_ROUNDS = 3
_MOST_ROUNDS = 200

Mark = Callable[[str], None]


class RanOut(Exception):
    """A rank ran out of memory while others may wait for it: no further case can be measured by these ranks."""

    def __init__(self, title: str) -> None:
        super().__init__(f"{title}: {OUT_OF_MEMORY}")
        self.title = title


@dataclass
class _Entry:
    """One contender at the case, on this rank. Milliseconds: a sample each."""

    contender: Contender
    attend: Attend
    leaves: list[Tensor]
    dout: Tensor
    host: tuple[float, float] = (0.0, 0.0)
    found: Found = field(default_factory=Found)


class Measurement:
    """`run` gives the rows on the first rank, and none on the others.

    skipped: titles of contenders that have run out of memory at this case. rates: of one device, known to the first.
    """

    def __init__(
        self,
        case: ContextCase,
        team: Team,
        asked: BenchmarkSettings,
        *,
        seed: int,
        note: Note,
        mark: Mark,
        rates: Rates,
    ) -> None:
        self.case, self.team, self.asked, self.seed = case, team, asked, seed
        self.note, self.mark, self.rates = note, mark, rates
        self.place = Place(case, team)
        self.clock = TeamClock(team)
        self.one: OneDevice | None = None
        self.expected: Expected | None = None
        self.dealt: dict[str, tuple[list[Tensor], Tensor]] = {}

    def run(self, contenders: Sequence[Contender], skipped: Sequence[str], seconds: float | None) -> list[Row]:
        """seconds: after which no further round is begun."""
        began = time.monotonic()
        rows = [failed_row(self.case, one, OUT_OF_MEMORY) for one in contenders if one.title in skipped]
        chosen = [one for one in contenders if one.title not in skipped and one.applies(self.case)]
        kept: list[Contender] = []
        for contender in chosen:
            reason = contender.refuses(self.case)
            if reason is None:
                kept.append(contender)
            else:
                self.note(contender.way, reason)
        if not self._alone("inputs", lambda: self._draw({one.layout for one in kept})):
            return self._of_first(rows + [failed_row(self.case, one, OUT_OF_MEMORY) for one in kept])
        entries = [entry for one in kept if (entry := self._try(one)) is not None]
        self._take_turns(entries, began, seconds)
        titles = [one.title for one in contenders]
        return self._of_first(sorted(rows + self._rows(entries), key=lambda row: titles.index(row["implementation"])))

    def _of_first(self, rows: list[Row]) -> list[Row]:
        return rows if self.team.rank == 0 else []

    def _draw(self, layouts: set[str]) -> None:
        """The inputs, what they should give, and on the first rank the same attention alone."""
        one, device = self.case.attention, self.team.device
        whole = make_sets(one, device, self.seed, 0)[0]
        for name in layouts:
            layout = self.place.layout(name)
            q, k, v, dout = (layout.shard(x.detach(), self.team.rank) for x in (whole.q, whole.k, whole.v, whole.dout))
            self.dealt[name] = (leaves_of([q, k, v]), dout.contiguous())
        if self.asked.reference and one.seqlen_q <= self.asked.check_longest:
            self.mark(f"{self.case}, float64")
            self.expected = expected(one, whole, Context(one, device))
        if self.team.rank == 0 and one.seqlen_q <= self.asked.one_device_longest:
            self._draw_one_device(whole)

    def _draw_one_device(self, whole: Inputs) -> None:
        self.mark(f"{self.case}, one device")
        clock = clock_for(self.team.device)
        one = OneDevice(self.case, whole, self.team.device, clock)
        try:
            one.begin(self.expected)
            self.one = one
        except torch.OutOfMemoryError:
            self.note("one device", OUT_OF_MEMORY)
        clock.release()

    def _try(self, contender: Contender) -> _Entry | None:
        """First calls: whether it runs, what it gives, what memory it needs, and how long launching takes."""
        self.mark(f"{self.case}, {contender.title}")
        leaves, dout = self.dealt[contender.layout]
        kept: list[Any] = []
        entry: _Entry | None = None

        def begin() -> None:
            nonlocal entry
            entry = _Entry(contender, contender.attend(self.place, *leaves), leaves, dout)
            out = entry.attend(*leaves)
            kept.append((out.detach(), gradients(out, leaves, dout)))

        try:
            with contender.within(self.place):
                reason = self._reason(begin, contender)
                if reason is None and entry is not None:
                    if self.expected is not None:
                        layout = self.place.layout(contender.layout)
                        entry.found.errors = errors_of_rank(self.expected, layout, self.team.rank, *kept.pop())
                    kept.clear()
                    entry.found.peak_gib = self.clock.peak_gib(lambda: self._launching(entry))
        except torch.OutOfMemoryError as error:
            raise RanOut(contender.title) from error
        self.clock.settle()
        if reason is not None:
            self.note(contender.title, reason)
            return None
        return entry

    def _reason(self, begin: Callable[[], None], contender: Contender) -> str | None:
        """Why the first call did not work, which for a peer only leaves it out; ours must work."""
        if contender.ours:
            begin()
            return None
        reason = None
        try:
            begin()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - other people's programs may raise anything; the others go on
            reason = first_line(error)
        return next((found for found in self.team.gather(reason) if found is not None), None)

    def _launching(self, entry: _Entry) -> None:
        outs: list[Tensor] = []
        forward = self.clock.seconds(lambda: outs.append(entry.attend(*entry.leaves)))
        entry.host = forward, self.clock.seconds(lambda: gradients(outs[0], entry.leaves, entry.dout))

    def _take_turns(self, entries: list[_Entry], began: float, seconds: float | None) -> None:
        """Rounds in which every contender gives one sample of each pass; who begins moves on by one a round."""
        number = 0
        while self._goes_on(number, time.monotonic() - began, seconds):
            if self.one is not None:
                self.mark(f"{self.case}, one device, round {number + 1}")
                self.one.turn()
            for entry in in_turn(entries, number):
                self.mark(f"{self.case}, {entry.contender.title}, round {number + 1}")
                self._turn(entry, number)
            number += 1

    def _goes_on(self, number: int, spent: float, seconds: float | None) -> bool:
        late = seconds is not None and spent >= seconds and number > 0
        enough = number >= self.asked.rounds and spent >= self.asked.min_seconds
        return bool(self.team.gather(not late and not enough and number < _MOST_ROUNDS)[0])

    def _turn(self, entry: _Entry, number: int) -> None:
        found = entry.found
        try:
            with entry.contender.within(self.place):
                forward, backward = self._sample(entry)
            found.forward.append(forward)
            found.backward.append(backward)
            if entry.contender.separable and number < _COMMUNICATION_ROUNDS:
                with only_communicating():
                    found.communication.append(sum(self._sample(entry)))
        except torch.OutOfMemoryError as error:
            raise RanOut(entry.contender.title) from error

    def _sample(self, entry: _Entry) -> tuple[float, float]:
        outs: list[Tensor] = []
        forward = self.clock.milliseconds(lambda: outs.append(entry.attend(*entry.leaves)), entry.host[0])
        backward = self.clock.milliseconds(lambda: gradients(outs[0], entry.leaves, entry.dout), entry.host[1])
        return forward, backward

    def _alone(self, what: str, step: Callable[[], None]) -> bool:
        """Whether a step without communication found the memory that it needs, on every rank."""
        enough = True
        try:
            step()
        except torch.OutOfMemoryError:
            enough = False
            self.dealt.clear()
            self.expected = self.one = None
        if all(self.team.gather(enough)):
            return True
        self.note(what, OUT_OF_MEMORY)
        return False

    def _rows(self, entries: list[_Entry]) -> list[Row]:
        everyone = self.team.gather([entry.found.summary() for entry in entries])
        if self.team.rank != 0:
            return []
        if self.one is not None:
            self.rates.add(self.case, *self.one.milliseconds())
        return [
            row_of(self.place, entry.contender, [of_rank[index] for of_rank in everyone], self.one, self.rates)
            for index, entry in enumerate(entries)
        ]
