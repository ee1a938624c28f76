"""One case measured by every baseline, forward, backward and, with rows=features, making the mask.

With rows=as-called a call is timed by itself with its launching, else its launching is hidden. A feature is measured
beside the plain call: its parts are "plain forward" and "plain backward".
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtrain_recipes.attention_benchmark.baselines.base import Attend, AttentionBaseline
from flashtrain_recipes.attention_benchmark.cases import Case, flops
from flashtrain_recipes.attention_benchmark.inputs import Context, Inputs, make_sets
from flashtrain_recipes.attention_benchmark.reference import Expected, expected
from flashtrain_recipes.harness.clock import Launch, Pace
from flashtrain_recipes.harness.rows import OUT_OF_MEMORY, Row
from flashtrain_recipes.harness.turns import Entry, Turns

FORWARD, BACKWARD, PLAN = "forward", "backward", "plan"
PLAIN = "plain "
# Up to this length the time with launching is a column too (of plans always): there it can be the longer one.
_WAITED_LENGTH = 512
# What an H200 copies in a second, read and written: the most that decoding could read.
COPY_GB_PER_SECOND = 4200


@dataclass
class Part:
    """A direction, or a plan. launches: makes what is timed. call: all that it takes, for its memory. error_of: of its
    answer. host_us, queued, waited: a sample each, of the processor, with launching hidden and with launching."""

    launches: Callable[[], Sequence[Launch]]
    call: Launch
    error_of: Callable[[Expected], float | None] = lambda known: None
    pace: Pace = field(init=False)
    peak_mib: float | None = field(init=False)
    error: float | None = None
    host_us: list[float] = field(default_factory=list)
    queued: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)


@dataclass
class AttentionEntry(Entry[AttentionBaseline]):
    """One baseline at the case."""

    parts: dict[str, Part] = field(default_factory=dict)


class Work(NamedTuple):
    """A case's masks and inputs."""

    context: Context
    sets: list[Inputs]


class AttentionTurns(Turns[Case, AttentionEntry]):
    """check: also compute the float64 reference, and each baseline's error against it."""

    def __init__(self, case: Case, *, check: bool, **common: Any) -> None:
        super().__init__(case, **common)
        self.check = check

    def begin(self) -> None:
        cases = [(PLAIN, self.case.plain)] if self.case.beside else []
        self.works = {
            prefix: Work(Context(case, self.device), make_sets(case, self.device, self.seed, self.clock.cache_bytes))
            for prefix, case in [*cases, ("", self.case)]
        }
        self.expected: Expected | None = None
        if self.check and not self.case.dropout:
            try:
                self.expected = expected(self.case, self.works[""].sets[0], self.works[""].context)
            except torch.OutOfMemoryError:
                self.note("the float64 reference", OUT_OF_MEMORY)

    def start(self, baseline: AttentionBaseline) -> None:
        entry = AttentionEntry(baseline)
        for prefix, (context, sets) in self.works.items():
            attend = baseline.attend(context.case, context)
            if self.case.page is not None:
                attend = torch.no_grad()(attend)
            attend(sets[0])
            for direction, part in passes(attend, sets).items():
                if direction in directions_of(self.case):
                    name = prefix + direction
                    self.attempt(baseline, name, partial(self._start_part, entry, name, part))
        plan = baseline.plan(self.case, self.works[""].context) if self.case.plans else None
        if plan is not None:
            self.attempt(baseline, PLAN, partial(self._start_part, entry, PLAN, Part(lambda: [plan], plan)))
        self.entries.append(entry)

    def _start_part(self, entry: AttentionEntry, name: str, part: Part) -> None:
        if self.expected is not None and not name.startswith(PLAIN):
            part.error = part.error_of(self.expected)
        part.peak_mib = self.clock.peak_mib(part.call)
        part.pace = self.clock.pace(part.launches())
        entry.parts[name], entry.samples[name] = part, []

    def sample(self, entry: AttentionEntry, part: str, number: int) -> None:
        found = entry.parts[part]
        launches = found.launches()
        took = (self.clock.called if self.case.as_called else self.clock.queued)(launches, found.pace)
        entry.add(part, took.milliseconds)
        found.host_us.append(took.host_us)
        if self.case.page is not None:
            found.queued.append(self.clock.queued(launches, found.pace).milliseconds)
        is_short = part == PLAN or self.case.seqlen_q <= _WAITED_LENGTH
        if is_short and not self.case.as_called and self.device.type == "cuda":
            found.waited.append(self.clock.waited(launches, found.pace.launches))

    def rows_of(self, entry: AttentionEntry) -> list[Row]:
        measured = {part: entry.median(part) for part, samples in entry.samples.items() if samples}
        return [self._row(entry, part, measured) for part in measured if not part.startswith(PLAIN)]

    def _row(self, entry: AttentionEntry, part: str, measured: dict[str, float]) -> Row:
        case, work, found, milliseconds = self.case, self.works[""], entry.parts[part], measured[part]
        counted = flops(case, work.context.counted_pairs, part)
        figures: Row = {
            "milliseconds": round(milliseconds, 6),
            "host_us": round(statistics.median(found.host_us), 3),
            "tflops": round(counted / milliseconds / 1e9, 3) if part != PLAN and milliseconds else None,
            "peak_memory_mib": None if found.peak_mib is None else round(found.peak_mib, 3),
            "error": found.error,
        }
        if case.kind not in ("full", "causal"):
            figures["density"] = round(work.context.visible_pairs / (case.seqlen_q * case.seqlen_k), 6)
        if found.queued:
            queued = statistics.median(found.queued)
            rate = work.sets[0].k.nbytes * 2 / queued / 1e6
            shown = {"gpu_milliseconds": queued, "gb_per_second": rate, "bandwidth_share": rate / COPY_GB_PER_SECOND}
            figures |= {name: round(value, 6) for name, value in shown.items()}
        if found.waited:
            figures["host_milliseconds"] = round(statistics.median(found.waited), 6)
        if PLAIN + part in measured:  # by the work of a dimension, of which a feature may have fewer
            of_plain = (measured[PLAIN + part] / case.beside) / (milliseconds / case.head_dim)
            figures["of_plain"] = round(of_plain, 4)
        return {"implementation": entry.baseline.title, "direction": part, **case.columns(), **figures}

    def without(self, baseline: AttentionBaseline, part: str, status: str, reason: str | None) -> list[Row]:
        return empty_rows(self.case, baseline.title, status, reason, [part] if part else None)


def passes(attend: Attend, sets: list[Inputs]) -> dict[str, Part]:
    """Forward, as in training: what backward will need is kept; and backward, whose forward passes are not timed: only
    this baseline's results are held meanwhile."""
    first = sets[0]

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(first), first.leaves, first.dout)

    def backward(one: Inputs) -> Launch:
        return partial(torch.autograd.grad, attend(one), one.leaves, one.dout, retain_graph=True)

    return {
        FORWARD: Part(
            lambda: [partial(attend, one) for one in sets],
            partial(attend, first),
            lambda known: known.error(attend(first).detach()),
        ),
        BACKWARD: Part(lambda: [backward(one) for one in sets], both, lambda known: known.gradient_error(*both()[:3])),
    }


def directions_of(case: Case) -> tuple[str, ...]:
    """What is timed of a case: a cache has no gradient."""
    return (FORWARD,) if case.page is not None else (FORWARD, BACKWARD)


def empty_rows(
    case: Case, title: str, status: str, reason: str | None, parts: Sequence[str] | None = None
) -> list[Row]:
    """The rows of a baseline without figures, a direction each. parts: those that failed; None: all."""
    none: Row = {**dict.fromkeys(("milliseconds", "tflops", "peak_memory_mib")), "status": status, "error": reason}
    return [
        {"implementation": title, "direction": direction, **case.columns(), **none}
        for direction in directions_of(case)
        if parts is None or direction in parts
    ]
