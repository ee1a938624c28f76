"""One case measured by every baseline, forward, backward and, with rows=features, making the mask.

With rows=as-called a call is timed by itself with its launching, else its launching is hidden. A feature is measured
beside the plain call: its parts are "plain forward" and "plain backward".
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
    """What is known of a part besides its samples. launches: makes what is timed. host_us, queued, waited: a sample
    each, of the processor, with launching hidden and with launching."""

    launches: Callable[[], Sequence[Launch]]
    pace: Pace
    peak_mib: float | None
    error: float | None
    host_us: list[float] = field(default_factory=list)
    queued: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)


@dataclass
class AttentionEntry(Entry[AttentionBaseline]):
    """One baseline at the case."""

    parts: dict[str, Part] = field(default_factory=dict)


class _Work:
    """A case's inputs and masks."""

    def __init__(self, case: Case, device: torch.device, seed: int, cache_bytes: int) -> None:
        self.case = case
        self.context = Context(case, device)
        self.sets = make_sets(case, device, seed, cache_bytes)


class AttentionTurns(Turns[Case, AttentionEntry]):
    """check: also compute the float64 reference, and each baseline's error against it."""

    def __init__(self, case: Case, *, check: bool, **common: Any) -> None:
        super().__init__(case, **common)
        self.check = check

    def begin(self) -> None:
        cases = [(PLAIN, self.case.plain)] if self.case.beside else []
        self.works = {
            prefix: _Work(case, self.device, self.seed, self.clock.cache_bytes)
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
        for prefix, work in self.works.items():
            attend = baseline.attend(work.case, work.context)
            if work.case.page is not None:
                attend = torch.no_grad()(attend)
            attend(work.sets[0])
            known = None if prefix else self.expected
            steps = {FORWARD: self._start_forward, BACKWARD: self._start_backward}
            for direction in directions_of(self.case):
                part = prefix + direction
                self.attempt(baseline, part, partial(steps[direction], entry, part, attend, work.sets, known))
        plan = baseline.plan(self.case, self.works[""].context) if self.case.plans else None
        if plan is not None:
            self.attempt(baseline, PLAN, partial(self._start_part, entry, PLAN, lambda: [plan], plan))
        self.entries.append(entry)

    def _start_forward(
        self, entry: AttentionEntry, part: str, attend: Attend, sets: list[Inputs], known: Expected | None
    ) -> None:
        """As in training: what the backward pass will need is kept."""
        error = None if known is None else known.error(attend(sets[0]).detach())
        self._start_part(entry, part, lambda: [partial(attend, one) for one in sets], partial(attend, sets[0]), error)

    def _start_backward(
        self, entry: AttentionEntry, part: str, attend: Attend, sets: list[Inputs], known: Expected | None
    ) -> None:
        def both() -> tuple[Tensor, ...]:
            return torch.autograd.grad(attend(sets[0]), sets[0].leaves, sets[0].dout)

        def launch(one: Inputs) -> Launch:
            return partial(torch.autograd.grad, attend(one), one.leaves, one.dout, retain_graph=True)

        error = None if known is None else known.gradient_error(*both()[:3])
        # The forward passes are run untimed; only this baseline's results are held meanwhile.
        self._start_part(entry, part, lambda: [launch(one) for one in sets], both, error)

    def _start_part(
        self,
        entry: AttentionEntry,
        part: str,
        launches: Callable[[], Sequence[Launch]],
        call: Launch,
        error: float | None = None,
    ) -> None:
        peak = self.clock.peak_mib(call)
        entry.parts[part] = Part(launches, self.clock.pace(launches()), peak, error)
        entry.samples[part] = []

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
