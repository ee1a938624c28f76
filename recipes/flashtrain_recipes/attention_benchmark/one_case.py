"""One case by every implementation: each is tried, then they take turns, and each gets a row a direction. As called, a
call is timed by itself with its launching, and what could not be measured is a row too.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtrain_recipes.attention_benchmark.cases import Case, flops
from flashtrain_recipes.attention_benchmark.inputs import Context, Inputs, counted_pairs, make_sets, visible_pairs
from flashtrain_recipes.attention_benchmark.peers import Peer
from flashtrain_recipes.attention_benchmark.peers.base import Attend
from flashtrain_recipes.attention_benchmark.reference import Expected, expected
from flashtrain_recipes.attention_benchmark.warm import Task
from flashtrain_recipes.benchmark_runner.measuring import (
    FEWEST_ROUNDS,
    OUT_OF_MEMORY,
    Clock,
    Effort,
    Launch,
    Note,
    Pace,
    Row,
    first_line,
    in_turn,
)

FORWARD, BACKWARD, PLAN = "forward", "backward", "plan"
# Up to this length the time with launching is told too (of plans always): there it can be the longer one.
_HOST_LENGTH = 512
# What an H200 copies in a second, read and written: the most that decoding could read.
COPY_GB_PER_SECOND = 4200


@dataclass
class _Direction:
    """What was found of one implementation in one direction. milliseconds: a sample each."""

    pace: Pace
    peak_mib: float | None = None
    error: float | None = None
    milliseconds: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    queued: list[float] = field(default_factory=list)


class _Work:
    """One case's inputs and masks."""

    def __init__(self, case: Case, device: torch.device, seed: int, cache_bytes: int) -> None:
        self.case = case
        self.context = Context(case, device)
        self.visible = visible_pairs(case, device)
        self.sets = make_sets(case, device, seed, cache_bytes)


@dataclass
class _Entry:
    """One implementation at one case."""

    peer: Peer
    attend: Attend
    work: _Work
    directions: dict[str, _Direction] = field(default_factory=dict)


class Measurement:
    """One case on one device. `run` gives its rows; what could not be measured is told to `note(title, reason)`."""

    def __init__(
        self,
        case: Case,
        device: torch.device,
        clock: Clock,
        *,
        seed: int,
        directions: Sequence[str],
        note: Note,
        as_called: bool = False,
    ) -> None:
        self.case, self.clock, self.note, self.as_called = case, clock, note, as_called
        self.wanted = directions_of(case, directions)
        # The plain call comes first: its rows are made before those that tell their share of it.
        todo = [case.plain, case] if case.beside else [case]
        self.works = [_Work(one, device, seed, clock.cache_bytes) for one in todo]
        self.failed: list[Row] = []

    def run(
        self, peers: Sequence[Peer], effort: Effort, *, check: bool = True, broken: Mapping[Task, str] | None = None
    ) -> list[Row]:
        """The rows of the implementations that could be measured, and of those that ran out of memory.

        check: also compute the float64 reference, and each implementation's error against it. broken: what must not be
        called, with the reason.
        """
        began = time.monotonic()
        wanted = self._expected() if check and not self.case.dropout else None
        entries = []
        for peer in peers:
            if not peer.applies(self.case):
                continue
            reason = peer.refuses(self.case)
            if reason is not None:
                self.note(peer.title, reason)
                continue
            if broken and (self.case, peer.name) in broken:
                self._fail(peer, self.wanted, broken[self.case, peer.name])
                continue
            if effort.is_over():
                self._fail(peer, self.wanted, "no time was left", "no time")
                continue
            for work in self.works:
                entry = self._try(peer, work, wanted if work is self.works[-1] else None)
                self.clock.release()
                if entry is None:
                    break
                entries.append(entry)
        self._take_turns(entries, effort, began)
        plain, rows = {}, []
        for entry in entries:
            for row in self._rows(entry):
                key = (row["implementation"], row["direction"])
                for_each_dimension = row["milliseconds"] / row["head_dim"]
                if entry.work is not self.works[-1]:
                    plain[key] = for_each_dimension
                    continue
                if key in plain:
                    row["of_plain"] = round(plain[key] / for_each_dimension, 4)
                rows.append(row)
        return rows + self.failed

    def _expected(self) -> Expected | None:
        try:
            return expected(self.case, self.works[-1].sets[0], self.works[-1].context)
        except torch.OutOfMemoryError:
            self.note("the float64 reference", OUT_OF_MEMORY)
            return None

    def _try(self, peer: Peer, work: _Work, wanted: Expected | None) -> _Entry | None:
        """First calls: whether it runs, what it gives, what memory it needs, and how long it takes about."""
        made: list[Attend] = []

        def begin() -> None:
            attend = peer.attend(work.case, work.context)
            made.append(torch.no_grad()(attend) if work.case.page is not None else attend)
            made[0](work.sets[0])

        if not self._guarded(peer, FORWARD, begin, self.wanted if self.as_called else None):
            return None
        entry = _Entry(peer, made[0], work)
        steps = {FORWARD: self._begin_forward, BACKWARD: self._begin_backward}
        for direction in self.wanted:
            self._guarded(peer, direction, partial(steps[direction], entry, wanted))
        if self.case.plans:
            self._guarded(peer, PLAN, lambda: self._begin_plan(entry))
        return entry if entry.directions else None

    def _begin_forward(self, entry: _Entry, wanted: Expected | None) -> None:
        one = entry.work.sets[0]
        error = None if wanted is None else wanted.error(entry.attend(one).detach())
        peak = self.clock.peak_mib(lambda: entry.attend(one))
        pace = self.clock.pace(self._forward_launches(entry))
        entry.directions[FORWARD] = _Direction(pace, peak, error)

    def _begin_backward(self, entry: _Entry, wanted: Expected | None) -> None:
        one = entry.work.sets[0]

        def both() -> tuple[Tensor, ...]:
            return _gradients(entry.attend(one), entry.peer.leaves(one), one.dout, keep=False)

        error = None if wanted is None else wanted.gradient_error(*entry.peer.gradients(both()))
        peak = self.clock.peak_mib(both)
        pace = self.clock.pace(self._backward_launches(entry))
        entry.directions[BACKWARD] = _Direction(pace, peak, error)

    def _begin_plan(self, entry: _Entry) -> None:
        launch = entry.peer.plan(entry.work.case, entry.work.context)
        if launch is not None:
            entry.directions[PLAN] = _Direction(self.clock.pace([launch]), self.clock.peak_mib(launch))

    def _take_turns(self, entries: list[_Entry], effort: Effort, began: float) -> None:
        """Rounds in which every implementation gives one sample a direction; who begins moves on by one a round."""
        for number in range(effort.rounds):
            if number >= FEWEST_ROUNDS and effort.is_late(began):
                break
            for direction in (FORWARD, BACKWARD, PLAN):
                for entry in in_turn(entries, number):
                    if direction in entry.directions:
                        done = self._guarded(entry.peer, direction, partial(self._sample, entry, direction))
                        if not done:
                            del entry.directions[direction]

    def _sample(self, entry: _Entry, direction: str) -> None:
        found = entry.directions[direction]
        launches = self._launches(entry, direction)
        took = (self.clock.called if self.as_called else self.clock.queued)(launches, found.pace)
        found.milliseconds.append(took.milliseconds)
        found.host_us.append(took.host_us)
        if self.case.page is not None:
            found.queued.append(self.clock.queued(launches, found.pace).milliseconds)
        if not self.as_called and (direction == PLAN or self.case.seqlen_q <= _HOST_LENGTH):
            host = self.clock.host_sample(launches, found.pace)
            found.host += [] if host is None else [host]

    def _launches(self, entry: _Entry, direction: str) -> list[Launch]:
        if direction == FORWARD:
            return self._forward_launches(entry)
        if direction == BACKWARD:
            return self._backward_launches(entry)
        plan = entry.peer.plan(entry.work.case, entry.work.context)
        return [plan] if plan is not None else []

    def _forward_launches(self, entry: _Entry) -> list[Launch]:
        """As in training: what the backward pass will need is kept."""
        return [partial(entry.attend, one) for one in entry.work.sets]

    def _backward_launches(self, entry: _Entry) -> list[Launch]:
        """The forward passes are run here, untimed; only this implementation's results are held meanwhile."""

        def launch(one: Inputs, out: Tensor) -> Launch:
            leaves = entry.peer.leaves(one)
            return lambda: _gradients(out, leaves, one.dout, keep=True)

        return [launch(one, entry.attend(one)) for one in entry.work.sets]

    def _guarded(
        self, peer: Peer, direction: str, step: Callable[[], object], fails: Sequence[str] | None = None
    ) -> bool:
        """Whether the step worked. What went wrong is noted in one line; a broken GPU ends the case.

        fails: the directions that then have no figure; None: this one.
        """
        said: list[str] = []
        with warnings.catch_warnings(record=True) as caught, peer.within():
            warnings.simplefilter("always")
            try:
                step()
                return True
            except torch.OutOfMemoryError:
                said.append(OUT_OF_MEMORY)
            except Exception as error:  # noqa: BLE001 - other people's kernels may raise anything; the others go on
                said += [first_line(error), *_reasons(caught)]
        self.clock.release()
        self.clock.check()
        self._fail(peer, fails or [direction], f"{direction}: {'; '.join(dict.fromkeys(said))}")
        return False

    def _fail(self, peer: Peer, directions: Sequence[str], reason: str, status: str = "failed") -> None:
        """Note why there is no figure: in rows too where memory was the reason, and of rows=as-called always."""
        self.note(peer.title, reason)
        status = OUT_OF_MEMORY if reason.endswith(f": {OUT_OF_MEMORY}") else status
        if self.as_called or status == OUT_OF_MEMORY:
            told = {"part": self.case.part, "status": status, "error": reason} if self.as_called else {"status": status}
            kept = [direction for direction in directions if direction in self.wanted]
            self.failed += [row_of(self.case, peer.title, direction, **told) for direction in kept]

    def _rows(self, entry: _Entry) -> list[Row]:
        rows, work = [], entry.work
        for direction, found in entry.directions.items():
            if not found.milliseconds:
                continue
            milliseconds = statistics.median(found.milliseconds)
            counted = flops(work.case, counted_pairs(work.case, work.visible), direction)
            row = row_of(
                work.case,
                entry.peer.title,
                direction,
                milliseconds=round(milliseconds, 6),
                host_us=round(statistics.median(found.host_us), 3),
                tflops=round(counted / milliseconds / 1e9, 3) if direction != PLAN and milliseconds else None,
                peak_memory_mib=None if found.peak_mib is None else round(found.peak_mib, 3),
                error=found.error,
            )
            if work.case.kind not in ("full", "causal"):
                row["density"] = round(work.visible / (work.case.seqlen_q * work.case.seqlen_k), 6)
            if found.queued:
                queued = statistics.median(found.queued)
                rate = work.sets[0].k.nbytes * 2 / queued / 1e6
                told = {"gpu_milliseconds": queued, "gb_per_second": rate, "bandwidth_share": rate / COPY_GB_PER_SECOND}
                row |= {name: round(value, 6) for name, value in told.items()}
            if found.host:
                row["host_milliseconds"] = round(statistics.median(found.host), 6)
            if self.as_called:
                row = {"part": self.case.part, **row}
            rows.append(row)
        return rows


def directions_of(case: Case, asked: Sequence[str]) -> list[str]:
    """Those of the directions asked for that the case has: a cache has no gradient."""
    return [direction for direction in asked if direction == FORWARD or case.page is None]


def row_of(case: Case, title: str, direction: str, **found: Any) -> Row:
    """One implementation's row; without figures where `found` only says what happened."""
    none = dict.fromkeys(("milliseconds", "tflops", "peak_memory_mib", "error"))
    return {"implementation": title, "direction": direction, **case.columns(), **none, **found}


def _gradients(out: Tensor, leaves: list[Tensor], dout: Tensor, *, keep: bool) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, leaves, dout, retain_graph=keep)


def _reasons(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    """Why SDPA found no kernel: it warns of each reason, under a line that says which kernel it is about."""
    lines = [str(warning.message).split(" (Triggered")[0].splitlines()[0] for warning in caught]
    noise = ("not used because", "runtime disabled")
    return [line[:200] for line in lines if not any(words in line for words in noise)][:2]
