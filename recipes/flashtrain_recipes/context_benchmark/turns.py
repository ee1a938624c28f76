"""One case measured by all ranks together: every baseline, alternating with the same
attention on one device.

All ranks call everything here in the same order; the first rank decides when to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flashtrain.errors import first_line
from flashtrain_recipes.attention_benchmark.inputs import make_sets
from flashtrain_recipes.attention_benchmark.reference import Expected
from flashtrain_recipes.context_benchmark.baseline import ContextBaseline, Place
from flashtrain_recipes.context_benchmark.cases import ContextCase
from flashtrain_recipes.context_benchmark.passes import Passes, only_communicating
from flashtrain_recipes.context_benchmark.ranks import Team
from flashtrain_recipes.context_benchmark.rows import row_of
from flashtrain_recipes.harness.clock import clock_for
from flashtrain_recipes.harness.rows import Row
from flashtrain_recipes.harness.turns import Entry, Sample, Turns

INPUTS, ONE_DEVICE = "the inputs", "one device"
_BOTH = "forward and backward"
_COMMUNICATION_ROUNDS = 3


class CaseFailed(Exception):
    """The error of a rank that failed and cannot go on with the others; `title` names what it was
    computing: a baseline, INPUTS or ONE_DEVICE."""

    def __init__(self, case: ContextCase, title: str, error: Exception) -> None:
        super().__init__(f"{case}, {title}: {first_line(error)}")
        self.title = title


@dataclass(kw_only=True)
class ContextEntry(Entry[Any]):
    """A baseline on all ranks, or flashtrain's attention on one device for comparison, with the
    times that were measured of it in the rounds of a case."""

    samples: dict[str, list[Sample]] = field(default_factory=lambda: {_BOTH: []})
    passes: Passes
    attention: Any = None  # Attention; None: of one device

    def measures(self) -> Row:
        """Return this rank's median times in milliseconds, peak memory and errors, by column."""
        return {**self.medians(_BOTH), "rounds": len(self.samples[_BOTH]), **self.passes.measures}


class ContextTurns(Turns[ContextCase, ContextEntry]):
    """Measures one case on this rank; `run` returns the rows on the first rank,
    and none on the others.

    Args:
        failed: {title: (status, reason)} of what failed at this case before the ranks were
            started anew, and is not measured: baselines, INPUTS or ONE_DEVICE.

    Raises:
        CaseFailed: anything failed on this rank, so that the others might wait for it forever.
    """

    def __init__(
        self,
        case: ContextCase,
        team: Team,
        options: Any,
        failed: Mapping[str, tuple[str, str | None]],
        **common: Any,
    ) -> None:
        super().__init__(case, **common)
        self.team, self.options, self.failed, self.place = team, options, failed, Place(case, team)
        self.one: ContextEntry | None = None  # the same attention on one device, of the first rank
        self.expected: Expected | None = None
        # Of each layout: the leaves q, k and v, and dout.
        self.shards: dict[str, tuple[list[Tensor], Tensor]] = {}

    def run(self, baselines: Sequence[ContextBaseline]) -> list[Row]:
        one, options = self.case.attention, self.options
        if INPUTS not in self.failed:
            with self._computing(INPUTS):
                whole = make_sets(one, self.device, self.seed, 0)[0]
                for name in {one.layout for one in baselines if one.refuses(self.case) is None}:
                    layout = self.place.layout(name)
                    all_of = (whole.q, whole.k, whole.v, whole.dout)
                    *leaves, dout = (
                        layout.shard(x.detach(), self.team.rank).contiguous() for x in all_of
                    )
                    self.shards[name] = [x.requires_grad_() for x in leaves], dout
                if options.reference and one.seqlen_q <= options.check_longest:
                    self.expected = self.case.expected(whole, self.device)
            if (
                self.team.rank == 0
                and one.seqlen_q <= options.one_device_longest
                and ONE_DEVICE not in self.failed
            ):
                with self._computing(ONE_DEVICE):
                    attend = self.case.attend(self.device)
                    leaves = [whole.q, whole.k, whole.v]
                    passes = Passes(
                        lambda *_, whole=whole: attend(whole),
                        leaves,
                        whole.dout,
                        clock_for(self.device),
                    )
                    passes.first(self.expected, lambda x: x)
                    self.one = ContextEntry(baseline=None, passes=passes)
                self.clock.free_cache()
            del whole
        return super().run(baselines)

    @contextmanager
    def _computing(self, title: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise CaseFailed(self.case, title, error) from error

    def guarded(self, baseline: ContextBaseline, do: Callable[[], object]) -> None:
        with self._computing(baseline.title):
            do()

    def refuses(self, baseline: ContextBaseline) -> tuple[str, Any] | None:
        return self.failed.get(INPUTS) or self.failed.get(baseline.title)

    def start(self, baseline: ContextBaseline) -> None:
        leaves, dout = self.shards[baseline.layout]
        layout = self.place.layout(baseline.layout)
        rank = self.team.rank
        attention = baseline.attend(self.place, *leaves)
        passes = Passes(attention.call, leaves, dout, self.clock, self.team.gather)
        passes.first(self.expected, lambda x: layout.shard(x[None], rank)[0])
        self.entries.append(ContextEntry(baseline=baseline, passes=passes, attention=attention))
        self.clock.free_cache()

    def begin_round(self, number: int) -> None:
        if self.one is not None:
            self.one.samples[_BOTH].append(self.one.passes.sample())

    def goes_on(self, number: int) -> bool:
        return bool(self.team.gather(super().goes_on(number))[0])

    def sample(self, entry: ContextEntry, part: str, number: int) -> Sample:
        sample = entry.passes.sample()
        if entry.baseline.separable and number < _COMMUNICATION_ROUNDS:
            with only_communicating():
                sample["communication_ms"] = sum(entry.passes.sample().values())
        return sample

    def rows_of(self, entry: ContextEntry) -> list[Row]:
        everyone = self.team.gather(entry.measures())
        one = None if self.one is None else self.one.measures()
        if self.team.rank == 0:
            return [row_of(self.place, entry.baseline, entry.attention, everyone, one)]
        return []
