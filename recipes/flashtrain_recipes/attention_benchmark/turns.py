"""One case of attention measured by every baseline: forward, backward and, with
rows=features, making the mask.

With rows=as-called each call is timed by itself, launching included; otherwise launching
is hidden. A feature is measured next to the call without it, whose parts are "plain
forward" and "plain backward".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtrain.folders.run_folder import OUT_OF_MEMORY
from flashtrain_recipes.attention_benchmark.baselines.base import Attend, AttentionBaseline
from flashtrain_recipes.attention_benchmark.cases import Case, flops
from flashtrain_recipes.attention_benchmark.inputs import Context, Inputs, make_sets
from flashtrain_recipes.attention_benchmark.reference import Expected, expected
from flashtrain_recipes.harness.clock import Launch, Pace
from flashtrain_recipes.harness.rows import Row
from flashtrain_recipes.harness.turns import Entry, Sample, Turns

FORWARD, BACKWARD, PLAN = "forward", "backward", "plan"
PLAIN = "plain "

# What is timed of a direction or plan: (makes the launches, one whole call for its memory, the
# error of its result).
Launches = tuple[Callable[[], Sequence[Launch]], Launch, Callable[[Expected], float | None]]
# Up to this length the time with launching is a column too (of plans always): there it
# can be the longer one.
_MAX_WAITED_LENGTH = 512
# What an H200 copies in a second, read and written: the most that decoding could read.
COPY_GB_PER_SECOND = 4200


class Part(NamedTuple):
    """One timed part of a baseline (forward, backward, or making the mask), as its first
    calls have prepared it."""

    # Returns the launches of one timing, one for each set of inputs.
    make: Callable[[], Sequence[Launch]]
    pace: Pace
    peak_mib: float | None  # the peak memory of the part; None: unknown
    error: float | None  # the result's error against the float64 reference; None: not computed


@dataclass
class AttentionEntry(Entry[AttentionBaseline]):
    """One baseline at the case; `parts` holds what is timed of it, such as
    {"forward": Part(...)}."""

    parts: dict[str, Part] = field(default_factory=dict)


class AttentionTurns(Turns[Case, AttentionEntry]):
    """Measures one case of attention by all baselines, in rounds.

    Args:
        check: also compute a float64 reference, and the error of each baseline against
            it (not with dropout).
    """

    def __init__(self, case: Case, *, check: bool, **common: Any) -> None:
        super().__init__(case, **common)
        self.check = check

    def begin(self) -> None:
        cases = {PLAIN: self.case.plain} if self.case.plain_head_dim else {}
        self.works = {
            prefix: (
                Context(case, self.device),
                make_sets(case, self.device, self.seed, self.clock.cache_bytes),
            )
            for prefix, case in {**cases, "": self.case}.items()
        }
        self.context, self.sets = self.works[""]
        self.expected: Expected | None = None
        if self.check and not self.case.dropout:
            try:
                self.expected = expected(self.case, self.sets[0], self.context)
            except torch.OutOfMemoryError:
                self.note("the float64 reference", OUT_OF_MEMORY)

    def start(self, baseline: AttentionBaseline) -> None:
        entry = AttentionEntry(baseline)
        for prefix, (context, sets) in self.works.items():
            attend = baseline.attend(context.case, context)
            if self.case.page is not None:
                attend = torch.no_grad()(attend)
            attend(sets[0])
            for direction, launches in passes(attend, sets).items():
                if direction in directions_of(self.case):
                    name = prefix + direction
                    self.attempt(baseline, name, partial(self._start_part, entry, name, launches))
        plan = baseline.plan(self.case, self.context) if self.case.plans else None
        if plan is not None:
            self.attempt(
                baseline,
                PLAN,
                partial(self._start_part, entry, PLAN, (lambda: [plan], plan, lambda _: None)),
            )
        self.entries.append(entry)

    def _start_part(self, entry: AttentionEntry, name: str, launches: Launches) -> None:
        make, whole, error_of = launches
        error = None if self.expected is None or name.startswith(PLAIN) else error_of(self.expected)
        peak = self.clock.peak_mib(whole)
        entry.parts[name] = Part(make, self.clock.calibrate(make()), peak, error)
        entry.samples[name] = []

    def sample(self, entry: AttentionEntry, part: str, number: int) -> Sample:
        make, pace, *_ = entry.parts[part]
        launches = make()
        took = (self.clock.called if self.case.as_called else self.clock.queued)(launches, pace)
        found = {"milliseconds": took.milliseconds, "host_us": took.host_us}
        if self.case.page is not None:
            found["gpu_milliseconds"] = self.clock.queued(launches, pace).milliseconds
        is_short = part == PLAN or self.case.seqlen_q <= _MAX_WAITED_LENGTH
        if is_short and not self.case.as_called and self.device.type == "cuda":
            found["host_milliseconds"] = self.clock.waited(launches, pace.launches)
        return found

    def rows_of(self, entry: AttentionEntry) -> list[Row]:
        measured = {part: entry.medians(part) for part, samples in entry.samples.items() if samples}
        return [self._row(entry, part, measured) for part in measured if not part.startswith(PLAIN)]

    def _row(self, entry: AttentionEntry, part: str, measured: dict[str, Sample]) -> Row:
        case, found, times = self.case, entry.parts[part], measured[part]
        milliseconds, counted = times["milliseconds"], flops(case, self.context.counted_pairs, part)
        figures: Row = {
            **{name: round(value, 6) for name, value in times.items()},
            "tflops": round(counted / milliseconds / 1e9, 3)
            if part != PLAN and milliseconds
            else None,
            "peak_memory_mib": None if found.peak_mib is None else round(found.peak_mib, 3),
            "error": found.error,
        }
        if case.kind not in ("full", "causal"):
            figures["density"] = round(
                self.context.visible_pairs / (case.seqlen_q * case.seqlen_k), 6
            )
        if case.page is not None:
            rate = self.sets[0].k.nbytes * 2 / times["gpu_milliseconds"] / 1e6
            figures |= {
                "gb_per_second": round(rate, 6),
                "bandwidth_share": round(rate / COPY_GB_PER_SECOND, 6),
            }
        # By the work of a dimension, of which a feature may have fewer.
        if PLAIN + part in measured:
            of_plain = (measured[PLAIN + part]["milliseconds"] / case.plain_head_dim) / (
                milliseconds / case.head_dim
            )
            figures["of_plain"] = round(of_plain, 4)
        return {
            "implementation": entry.baseline.title,
            "direction": part,
            **case.columns(),
            **figures,
        }

    def without(
        self, baseline: AttentionBaseline, part: str, status: str, reason: str | None
    ) -> list[Row]:
        return empty_rows(self.case, baseline.title, status, reason, [part] if part else None)


def passes(attend: Attend, sets: list[Inputs]) -> dict[str, Launches]:
    """Return {direction: Launches} to time: forward, which saves what backward
    needs, and backward alone.

    Args:
        attend: computes the output from one set of inputs.
        sets: the sets of inputs, one for each launch of a timing, so that no launch finds
            its inputs in the cache.
    """
    first = sets[0]

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(first), first.leaves, first.dout)

    def backward(one: Inputs) -> Launch:
        return partial(torch.autograd.grad, attend(one), one.leaves, one.dout, retain_graph=True)

    return {
        FORWARD: (
            lambda: [partial(attend, one) for one in sets],
            partial(attend, first),
            lambda known: known.error(attend(first).detach()),
        ),
        BACKWARD: (
            lambda: [backward(one) for one in sets],
            both,
            lambda known: known.gradient_error(*both()[:3]),
        ),
    }


def directions_of(case: Case) -> tuple[str, ...]:
    """Return the directions measured at a case: "forward", and "backward" unless
    it decodes with a cache."""
    return (FORWARD,) if case.page is not None else (FORWARD, BACKWARD)


def empty_rows(
    case: Case, title: str, status: str, reason: str | None, parts: Sequence[str] | None = None
) -> list[Row]:
    """Return rows that report the baseline called `title` as not measured, one for each direction
    in `parts`; None: for every direction of the case."""
    none: Row = {
        **dict.fromkeys(("milliseconds", "tflops", "peak_memory_mib")),
        "status": status,
        "error": reason,
    }
    return [
        {"implementation": title, "direction": direction, **case.columns(), **none}
        for direction in directions_of(case)
        if parts is None or direction in parts
    ]
