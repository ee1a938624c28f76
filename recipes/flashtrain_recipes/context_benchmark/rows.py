"""The rows of a case: the slowest rank's times, the largest memory and errors, and a
comparison with one device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flashtrain.distributed.context.work import attention_work, imbalance, visible_keys
from flashtrain_recipes.context_benchmark.baseline import Attention, ContextBaseline, Place
from flashtrain_recipes.context_benchmark.cases import ContextCase
from flashtrain_recipes.harness.rows import Row

MEASURED, NOT_MEASURED = "measured", "not measured"
_ERRORS = ("error", "gradient_error")
# What cases have in common that differ in length and degree.
_SAME = ("mask", "heads", "kv_heads", "head_dim", "dtype")


def row_of(
    place: Place,
    baseline: ContextBaseline,
    attention: Attention,
    ranks: Sequence[Row],
    one: Row | None,
) -> Row:
    """Return the row of a baseline at a case.

    Args:
        ranks: the measurements of each rank, by column.
        one: the measurements of one device, by column; None: it was not measured.
    """
    case = place.case
    found: Any = {
        key: max((of[key] for of in ranks if of[key] is not None), default=None) for key in ranks[0]
    }
    took, alone = found["forward_ms"] + found["backward_ms"], found.get("communication_ms")
    times = {key: round(found[key], 4) for key in ("forward_ms", "backward_ms")}
    row = {
        **baseline.columns(case),
        **times,
        "one_device_ms": None,
        "one_device": NOT_MEASURED,
        "efficiency": None,
    }
    if one is not None:
        row |= _one_device(row, one["forward_ms"], one["backward_ms"], MEASURED)
    # ranks that divide the heads of the same tokens have as much to do
    work = attention_work(place.layout(baseline.layout), visible_keys(case.mask)).reshape(
        -1, attention.together
    )
    row |= {
        "tflops_per_device": round(case.flops / took / case.degree / 1e9, 4),
        "communication_ms": None if alone is None else round(alone, 4),
        "communication_share": None if alone is None else round(alone / took, 4),
        "sent_mib": round(attention.traffic.total / 2**20, 3),
        "imbalance": round(imbalance(np.repeat(work.mean(1), attention.together)), 4),
        "peak_memory_gib": _rounded(found["peak_memory_gib"]),
        "one_device_memory_gib": None if one is None else _rounded(one["peak_memory_gib"]),
    }
    if found["error"] is not None:
        row |= {key: found[key] for key in _ERRORS}
        if one is not None:
            row |= {f"one_device_{key}": one[key] for key in _ERRORS}
            ratios = [found[key] / one[key] for key in _ERRORS if one[key]]
            row["error_ratio"] = _rounded(max(ratios) if len(ratios) == 2 else None)
    return {**row, "rounds": found["rounds"]}


def extrapolated(
    row: Row, case: ContextCase, rows: Iterable[Mapping[str, Any]], cases: Sequence[ContextCase]
) -> Row:
    """Return the row with one device's times extrapolated by FLOPs where they were not measured.

    Args:
        rows: the rows so far. The longest measured one with the same mask, heads and
            dtype gives the FLOP rate.
        cases: the cases of the run.
    """
    known = [
        one
        for one in rows
        if one.get("one_device") == MEASURED and all(one[key] == row[key] for key in _SAME)
    ]
    if row.get("one_device") != NOT_MEASURED or not known:
        return row
    longest = max(known, key=lambda other: int(other["seqlen"]))
    of = next(
        one for one in cases if all(longest[key] == value for key, value in one.columns().items())
    )
    ratio = case.flops / of.flops
    forward, backward = (
        ratio * longest[f"one_device_{part}_ms"] for part in ("forward", "backward")
    )
    return {
        **row,
        **_one_device(row, forward, backward, f"extrapolated from {longest['seqlen']} tokens"),
    }


def _one_device(row: Row, forward: float, backward: float, origin: str) -> Row:
    took = row["forward_ms"] + row["backward_ms"]
    return {
        "one_device_forward_ms": round(forward, 4),
        "one_device_backward_ms": round(backward, 4),
        "one_device_ms": round(forward + backward, 4),
        "one_device": origin,
        "efficiency": round((forward + backward) / (row["degree"] * took), 4),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
