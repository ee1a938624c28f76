"""One case on all ranks of its team: every baseline is tried, then they take turns with one device.

All ranks call everything here at the same points. What one rank alone decides, it tells the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from flashtrain.errors import first_line
from flashtrain.training.out_of_memory import is_out_of_memory
from flashtrain_recipes.attention_benchmark.baselines.ours import Flashtrain
from flashtrain_recipes.attention_benchmark.inputs import Context, Inputs, make_sets
from flashtrain_recipes.attention_benchmark.reference import Expected, expected
from flashtrain_recipes.attention_benchmark.settings import BenchmarkSettings
from flashtrain_recipes.context_benchmark.baseline import Attention, ContextBaseline, Place
from flashtrain_recipes.context_benchmark.cases import ContextCase
from flashtrain_recipes.context_benchmark.passes import Found, Passes
from flashtrain_recipes.context_benchmark.ranks import Alone, Team
from flashtrain_recipes.context_benchmark.rows import named, row_of
from flashtrain_recipes.harness.rows import OUT_OF_MEMORY, Row
from flashtrain_recipes.harness.turns import Entry, Turns

INPUTS = "the inputs"
_BOTH = "forward and backward"
_COMMUNICATION_ROUNDS = 3


class CaseFailed(Exception):
    """This rank cannot go on with the others. title: of what it computed."""

    def __init__(self, case: ContextCase, title: str, error: Exception) -> None:
        super().__init__(f"{case}, {title}: {first_line(error)}")
        self.title = title


@dataclass
class ContextEntry(Entry[ContextBaseline]):
    attention: Attention = field(kw_only=True)
    passes: Passes = field(kw_only=True)


class ContextTurns(Turns[ContextCase, ContextEntry]):
    """`run` gives the rows on the first rank. full: titles of baselines that ran out of memory at this case before."""

    def __init__(
        self, case: ContextCase, team: Team, asked: BenchmarkSettings, full: Collection[str], **common: Any
    ) -> None:
        super().__init__(case, **common)
        self.team, self.asked, self.full = team, asked, full
        self.place = Place(case, team)
        self.one: Passes | None = None
        self.expected: Expected | None = None
        self.shards: dict[str, tuple[list[Tensor], Tensor]] = {}  # of each layout: the leaves q, k and v, and dout

    def run(self, baselines: Sequence[ContextBaseline]) -> list[Row]:
        """The inputs, what they should give, and on the first rank the same attention alone; then as every case."""
        one, device = self.case.attention, self.device
        if INPUTS not in self.full:
            try:
                whole = make_sets(one, device, self.seed, 0)[0]
                for name in {one.layout for one in baselines if one.refuses(self.case) is None}:
                    layout, all_of = self.place.layout(name), (whole.q, whole.k, whole.v, whole.dout)
                    *leaves, dout = (layout.shard(x.detach(), self.team.rank).contiguous() for x in all_of)
                    self.shards[name] = [x.requires_grad_() for x in leaves], dout
                if self.asked.reference and one.seqlen_q <= self.asked.check_longest:
                    self.expected = expected(one, whole, Context(one, device))
            except Exception as error:
                raise CaseFailed(self.case, INPUTS, error) from error
            if self.team.rank == 0 and one.seqlen_q <= self.asked.one_device_longest:
                self._begin_one_device(whole)
            del whole
        return super().run(baselines)

    def _begin_one_device(self, whole: Inputs) -> None:
        attend = Flashtrain().attend(self.case.attention, Context(self.case.attention, self.device))
        one = Passes(lambda *_: attend(whole), [whole.q, whole.k, whole.v], whole.dout, Alone(self.device))
        try:
            one.first(self.clock, self.expected, lambda x: x)
            self.one = one
        except torch.OutOfMemoryError:
            self.note("one device", OUT_OF_MEMORY)
        self.clock.settle()

    def refuses(self, baseline: ContextBaseline) -> tuple[str, Any] | None:
        if baseline.title in self.full or INPUTS in self.full:
            return OUT_OF_MEMORY, None
        return cast("tuple[str, Any] | None", self.team.gather(super().refuses(baseline))[0])

    def start(self, baseline: ContextBaseline) -> None:
        leaves, dout = self.shards[baseline.layout]
        attention = baseline.attend(self.place, *leaves)
        passes = Passes(attention.call, leaves, dout, self.team)
        layout, rank = self.place.layout(baseline.layout), self.team.rank
        passes.first(self.clock, self.expected, lambda x: layout.shard(x[None], rank)[0])
        self.entries.append(ContextEntry(baseline, {_BOTH: []}, attention=attention, passes=passes))
        self.clock.settle()

    def begin_round(self, number: int) -> None:
        if self.one is not None:
            self.one.turn()

    def goes_on(self, number: int) -> bool:
        return bool(self.team.gather(super().goes_on(number))[0])

    def sample(self, entry: ContextEntry, part: str, number: int) -> None:
        separately = entry.baseline.separable and number < _COMMUNICATION_ROUNDS
        entry.add(part, entry.passes.turn(communication=separately))

    def guarded(self, baseline: ContextBaseline, do: Callable[[], object]) -> str | None:
        """Why it did not work on some rank, which for other people's only leaves it out; ours must work, and where
        there is no memory on one rank the others may wait for it: raises CaseFailed."""
        reason = None
        try:
            with baseline.computing(self.place):
                do()
        except Exception as error:
            if baseline.ours or is_out_of_memory(error):
                raise CaseFailed(self.case, baseline.title, error) from error
            reason = first_line(error)
        return next((found for found in self.team.gather(reason) if found is not None), None)

    def without(self, baseline: ContextBaseline, part: str, status: str, reason: str | None) -> list[Row]:
        (row,) = super().without(baseline, part, status, reason)
        return [{**named(self.case, baseline), **row}]

    def rows_of(self, entry: ContextEntry) -> list[Row]:
        everyone: list[Found] = self.team.gather(entry.passes.found())
        one = None if self.one is None else self.one.found()
        return [row_of(self.place, entry.baseline, entry.attention, everyone, one)] if self.team.rank == 0 else []
