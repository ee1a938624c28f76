"""What is found of one contender at one case, as the columns of a row.

B batch (1), S sequence, R ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from flashtrain.distributed.context.costs import attention_work, imbalance, visible_keys
from flashtrain_recipes.attention_benchmark.measure import Row
from flashtrain_recipes.context_benchmark.case import ContextCase
from flashtrain_recipes.context_benchmark.contenders import Contender, Place
from flashtrain_recipes.context_benchmark.errors import Errors
from flashtrain_recipes.context_benchmark.one_device import MEASURED, OneDevice, Rates


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
