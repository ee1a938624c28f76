"""Tables of attention over several devices, and efficiency against length, a panel for each mask and a line for each
contender.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.report.figures import line_figure
from flashtrain.report.pivot import View
from flashtrain.report.rows import Row, has_failed, status_text, values_of
from flashtrain.report.table import Table, make_table
from flashtrain_recipes.attention_benchmark.figures import family_path, heads_of

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


def families(rows: Rows) -> dict[str, list[Row]]:
    """The rows of each family by its name in words, with a key for each mask's efficiency: the figures' panels."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("seqlen") is not None:
            told = {**row, _panel(row["mask"]): row.get("efficiency")}
            found.setdefault(_name(row), []).append(told)
    return {
        name: kept
        for name, kept in found.items()
        if len(values_of(kept, "seqlen")) > 1 and values_of(kept, "efficiency")
    }


def efficiency_figure(rows: Rows, path: str | Path) -> Path:
    """Draw the first family at `path`, and the others beside it. UserError: no shape was measured at two lengths."""
    path = Path(path)
    found = families(rows)
    if not found:
        raise UserError("no shape was measured at two lengths: there is no curve to draw.")
    for number, (name, kept) in enumerate(found.items()):
        place, title = family_path(path, number, name), f"efficiency, {name}"
        panels = [_panel(mask) for mask in values_of(kept, "mask")]
        line_figure(kept, "seqlen", panels, ["implementation"], place, title=title, log_y=False, height=4.6)
    return path


def _panel(mask: str) -> str:
    return f"efficiency, {mask}"


def _name(row: Mapping[str, Any]) -> str:
    return f"{heads_of(row)}, {row['dtype']}, {row['degree']} devices"
