"""The tables of attention over several devices: one of efficiencies, one of what they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashtrain.report.pivot import View
from flashtrain.report.rows import has_failed, status_text, values_of
from flashtrain.report.table import Table, make_table

Rows = Sequence[Mapping[str, Any]]

_SHAPE = ("heads", "kv_heads", "head_dim", "dtype")
_TIMES = ("forward_ms", "backward_ms", "one_device_ms", "one_device", "efficiency", "tflops_per_device")
_REST = (
    "communication_ms", "communication_share", "sent_mib", "imbalance", "peak_memory_gib", "one_device_memory_gib",
    "error", "gradient_error", "error_ratio",
)  # fmt: skip


def tables(rows: Rows) -> list[Table]:
    """Efficiency by contender, the times, and the rest, for each shape by itself where there are several."""
    told = [key for key in _SHAPE if len(values_of(rows, key)) > 1]
    index = ["mask", *told, "seqlen", "degree"]
    found = []
    if values_of(rows, "efficiency"):
        title = "efficiency: time on one device / (devices x time on them)"
        found.append(View(index, "implementation", "efficiency").table(rows, title))
    for title, measures in (("times, forward and backward", _TIMES), ("what they come from", _REST)):
        shown = [key for key in measures if values_of(rows, key)]
        if shown:
            found.append(make_table(rows, [*index, "implementation", *shown], title))
    return found


def case_line(rows: Rows) -> str:
    """One case's rows in a line: milliseconds forward/backward and efficiency, or what happened."""
    parts = []
    for row in rows:
        if has_failed(row):
            parts.append(f"{row['implementation']} {status_text(row)}")
            continue
        share = "" if row.get("efficiency") is None else f" ({row['efficiency']:.1%})"
        parts.append(f"{row['implementation']} {row['forward_ms']:.3g}/{row['backward_ms']:.3g} ms{share}")
    return "; ".join(parts) or "nothing could be measured"
