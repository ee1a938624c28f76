"""What is found of one contender at one case, as the columns of a row: times, errors against float64, and the same
attention on one device by our kernels, measured or computed from the rate at a shorter length.

B batch (1), S sequence, n tokens a rank holds, R ranks, H query heads, D head dimension; g query heads of the last
key/value head.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashtrain.distributed.context.layout import Layout, attention_work, imbalance, visible_keys
from flashtrain_recipes.attention_benchmark.baselines.ours import Flashtrain
from flashtrain_recipes.attention_benchmark.inputs import Context, Inputs
from flashtrain_recipes.attention_benchmark.reference import Expected
from flashtrain_recipes.benchmark_runner.measuring import Clock, Pace, Row
from flashtrain_recipes.context_benchmark.contenders import Contender, ContextCase, Place, gradients


class Errors(NamedTuple):
    """The largest difference from the reference over the reference's largest value: of out, and of dQ, dK and dV."""

    out: float
    gradients: float

    @classmethod
    def largest(cls, found: list[Errors]) -> Errors:
        return cls(max(one.out for one in found), max(one.gradients for one in found))

    def over(self, other: Errors) -> float | None:
        """How many times larger than another's, the larger of the two; None where the other has none."""
        if not (other.out and other.gradients):
            return None
        return max(self.out / other.out, self.gradients / other.gradients)


def errors_of_rank(expected: Expected, layout: Layout, rank: int, out: Tensor, gradients: tuple[Tensor, ...]) -> Errors:
    """Of what a rank holds: out (1, n, H, D) and dq, dk, dv. The largest of all ranks' is the whole's."""
    dq, dk, dv = gradients
    group = expected.out.shape[1]
    of_gradients = (
        _error(layout, rank, dq[-1, :, -group:], expected.dq),
        _error(layout, rank, dk[-1, :, -1], expected.dk),
        _error(layout, rank, dv[-1, :, -1], expected.dv),
    )
    return Errors(_error(layout, rank, out[-1, :, -group:], expected.out), max(of_gradients))


def _error(layout: Layout, rank: int, found: Tensor, whole: Tensor) -> float:
    largest = float(whole.abs().max()) or 1.0
    mine = layout.shard(whole[None], rank)[0]
    return float((found.double() - mine).abs().max()) / largest


MEASURED = "measured"


@dataclass
class Rates:
    """What one device has reached so far: for each family of cases {length: (FLOPs, forward ms, backward ms)}."""

    found: dict[tuple[Any, ...], dict[int, tuple[float, float, float]]] = field(default_factory=dict)

    def add(self, case: ContextCase, forward: float, backward: float) -> None:
        self.found.setdefault(case.family, {})[case.attention.seqlen_q] = (case.flops, forward, backward)

    def extrapolated(self, case: ContextCase) -> tuple[float, float, int] | None:
        """(forward ms, backward ms, the length they follow from): as many FLOP/s as at the longest length measured."""
        known = self.found.get(case.family)
        if not known:
            return None
        length = max(known)
        flops, forward, backward = known[length]
        return forward * case.flops / flops, backward * case.flops / flops, length


class OneDevice:
    """One case on one rank's device."""

    def __init__(self, case: ContextCase, inputs: Inputs, device: torch.device, clock: Clock) -> None:
        self.case, self.inputs, self.clock = case, inputs, clock
        self.attend = Flashtrain().attend(case.attention, Context(case.attention, device))
        self.leaves = [inputs.q, inputs.k, inputs.v]
        self.errors: Errors | None = None
        self.peak_gib: float | None = None
        self._forward: list[float] = []
        self._backward: list[float] = []
        self._host = (0.0, 0.0)

    def begin(self, expected: Expected | None) -> None:
        """A first call of each pass: what they give, how much memory they need, and how long launching takes."""
        kept: list[Any] = []

        def both() -> None:
            began = time.perf_counter()
            out = self.attend(self.inputs)
            between = time.perf_counter()
            kept.append((out.detach(), gradients(out, self.leaves, self.inputs.dout)))
            self._host = (between - began, time.perf_counter() - between)

        both()
        kept.clear()
        peak = self.clock.peak_mib(both)
        self.peak_gib = None if peak is None else peak / 1024
        if expected is not None:
            out, (dq, dk, dv) = kept[-1]
            self.errors = Errors(expected.error(out), expected.gradient_error(dq, dk, dv))

    def turn(self) -> None:
        """One sample of each pass."""
        kept: list[Any] = []
        forward, backward = self._host
        took = self.clock.sample([lambda: kept.append(self.attend(self.inputs))], Pace(1, forward))
        self._forward.append(took)
        one = [lambda: gradients(kept[0], self.leaves, self.inputs.dout)]
        self._backward.append(self.clock.sample(one, Pace(1, backward)))

    def milliseconds(self) -> tuple[float, float]:
        """(forward, backward), the medians."""
        return statistics.median(self._forward), statistics.median(self._backward)


class Summary(NamedTuple):
    """One rank's: medians in milliseconds."""

    forward: float
    backward: float
    communication: float | None
    rounds: int
    peak_gib: float | None
    errors: Errors | None


@dataclass
class Found:
    """One rank's samples in milliseconds; communication: of both passes together."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    communication: list[float] = field(default_factory=list)
    peak_gib: float | None = None
    errors: Errors | None = None

    def summary(self) -> Summary:
        alone = statistics.median(self.communication) if self.communication else None
        forward, backward = statistics.median(self.forward), statistics.median(self.backward)
        return Summary(forward, backward, alone, len(self.forward), self.peak_gib, self.errors)


def row_of(place: Place, contender: Contender, ranks: Sequence[Summary], one: OneDevice | None, rates: Rates) -> Row:
    """The row: of times, memory and errors the largest of all ranks'. one: the same on one device, where measured."""
    case = place.case
    forward, backward = max(of.forward for of in ranks), max(of.backward for of in ranks)
    took = forward + backward
    row = {**_named(case, contender), "forward_ms": round(forward, 4), "backward_ms": round(backward, 4)}
    row |= _against_one(case, took, one, rates)
    row["tflops_per_device"] = round(case.flops / took / case.degree / 1e9, 4)
    alone = [of.communication for of in ranks if of.communication is not None]
    if alone:
        row |= {"communication_ms": round(max(alone), 4), "communication_share": round(max(alone) / took, 4)}
    sent = contender.traffic(place)
    row["sent_mib"] = None if sent is None else round(sent.total / 2**20, 3)
    row["imbalance"] = round(_imbalance(place, contender), 4)
    peaks = [of.peak_gib for of in ranks if of.peak_gib is not None]
    row["peak_memory_gib"] = round(max(peaks), 3) if peaks else None
    row["one_device_memory_gib"] = None if one is None or one.peak_gib is None else round(one.peak_gib, 3)
    row |= _errors([of.errors for of in ranks if of.errors is not None], one)
    return {**row, "rounds": ranks[0].rounds}


def failed_row(case: ContextCase, contender: Contender, status: str) -> Row:
    """The row of a contender that has no figure."""
    return {**_named(case, contender), "forward_ms": None, "backward_ms": None, "status": status}


def rates_of(rows: Sequence[Row], todo: Sequence[ContextCase]) -> Rates:
    """What rows of this run say of one device."""
    rates = Rates()
    for case in todo:
        for row in rows:
            if row.get("one_device") == MEASURED and all(row.get(key) == of for key, of in case.columns().items()):
                rates.add(case, row["one_device_forward_ms"], row["one_device_backward_ms"])
    return rates


def _named(case: ContextCase, contender: Contender) -> dict[str, Any]:
    names = {"implementation": contender.title, "way": contender.way, "layout": contender.layout}
    return {**names, **case.columns()}


def _against_one(case: ContextCase, took: float, one: OneDevice | None, rates: Rates) -> dict[str, Any]:
    if one is not None:
        times, origin = one.milliseconds(), MEASURED
    else:
        found = rates.extrapolated(case)
        if found is None:
            return {"one_device_ms": None, "one_device": "not measured", "efficiency": None}
        times, origin = found[:2], f"extrapolated from {found[2]} tokens"
    forward, backward = times
    return {
        "one_device_forward_ms": round(forward, 4),
        "one_device_backward_ms": round(backward, 4),
        "one_device_ms": round(forward + backward, 4),
        "one_device": origin,
        "efficiency": round((forward + backward) / (case.degree * took), 4),
    }


def _imbalance(place: Place, contender: Contender) -> float:
    """max / mean of attention work: ranks that divide the heads of the same tokens have as much to do."""
    work = attention_work(place.layout(contender.layout), visible_keys(place.case.mask))
    together = contender.computing_together(place.case)
    return imbalance(np.repeat(work.reshape(-1, together).mean(1), together))


def _errors(found: Sequence[Errors], one: OneDevice | None) -> dict[str, Any]:
    if not found:
        return {}
    worst = Errors.largest(list(found))
    row: dict[str, Any] = {"error": worst.out, "gradient_error": worst.gradients}
    if one is not None and one.errors is not None:
        ratio = worst.over(one.errors)
        row |= {"one_device_error": one.errors.out, "one_device_gradient_error": one.errors.gradients}
        row["error_ratio"] = None if ratio is None else round(ratio, 3)
    return row
