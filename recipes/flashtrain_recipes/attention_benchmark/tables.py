"""The tables that a benchmark prints: a row a shape and direction, a column an implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashtrain.report.pivot import View
from flashtrain.report.rows import has_failed, values_of
from flashtrain.report.table import Table

_SHAPE = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "mask", "density", "features", "dropout")
_MEASURES = {
    "tflops": "TFLOP/s",
    "milliseconds": "milliseconds",
    "host_milliseconds": "milliseconds with launching",
    "peak_memory_mib": "peak memory, MiB beyond the inputs",
    "error": "largest error over the float64 reference's largest value",
}

Rows = Sequence[Mapping[str, Any]]


def tables(rows: Rows) -> list[Table]:
    """One wide table for each measure that the rows have."""
    found = []
    for measure, title in _MEASURES.items():
        kept = [row for row in rows if row.get(measure) is not None or (has_failed(row) and measure == "tflops")]
        if kept and values_of(kept, measure):
            found.append(View(_index(rows, kept), "implementation", measure).table(kept, title))
    return found


def _index(rows: Rows, kept: Rows) -> list[str]:
    """The columns that tell shapes apart: those that differ, and always the length, head dimension and mask."""
    always = ("seqlen_q", "head_dim", "mask")
    told = [key for key in _SHAPE if key in always or len(values_of(rows, key)) > 1]
    if "seqlen_k" in told and all(row["seqlen_k"] == row["seqlen_q"] for row in rows):
        told.remove("seqlen_k")
    if "kv_heads" in told and all(row["kv_heads"] == row["heads"] for row in rows):
        told.remove("kv_heads")
    return [*[key for key in told if values_of(kept, key)], "direction"]


def case_line(rows: Rows) -> str:
    """One case's rows in a line: TFLOP/s forward/backward of each implementation, or what happened to it."""
    parts = []
    for name in values_of(rows, "implementation"):
        own = {row["direction"]: row for row in rows if row["implementation"] == name}
        cells = [_cell(own[direction]) for direction in ("forward", "backward") if direction in own]
        plan = own.get("plan")
        parts.append(f"{name} {'/'.join(cells)}" + (f" (plan {plan['milliseconds']:.3g} ms)" if plan else ""))
    return "; ".join(parts) or "nothing could be measured"


def _cell(row: Mapping[str, Any]) -> str:
    if row.get("tflops") is None:
        return str(row.get("status") or "-")
    return f"{row['tflops']:.0f}" if row["tflops"] >= 10 else f"{row['tflops']:.2g}"
