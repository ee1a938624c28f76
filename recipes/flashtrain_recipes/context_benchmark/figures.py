"""Efficiency against length, a panel for each mask and a line for each way and layout.

A family is everything of a shape and degree; each family with two lengths gets a figure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.report.figures import line_figure
from flashtrain.report.rows import Row, values_of

Rows = Sequence[Mapping[str, Any]]


def families(rows: Rows) -> dict[str, list[Row]]:
    """The rows of each family by its name in words, with a key for each mask's efficiency: the figures' panels."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("seqlen") is not None:
            told = {**row, _panel(row["mask"]): row.get("efficiency")}
            found.setdefault(_name(row), []).append(told)
    return {name: kept for name, kept in found.items() if len(values_of(kept, "seqlen")) > 1 and _has_any(kept)}


def efficiency_figure(rows: Rows, path: str | Path) -> Path:
    """Draw the first family at `path`, and the others beside it. UserError: no shape was measured at two lengths."""
    path = Path(path)
    found = families(rows)
    if not found:
        raise UserError("no shape was measured at two lengths: there is no curve to draw.")
    for number, (name, kept) in enumerate(found.items()):
        place = path if number == 0 else path.with_name(f"{path.stem}-{_slug(name)}{path.suffix}")
        panels = [_panel(mask) for mask in values_of(kept, "mask")]
        line_figure(
            kept, "seqlen", panels, ["implementation"], place, title=f"efficiency, {name}", log_y=False, height=4.6
        )
    return path


def _has_any(rows: Rows) -> bool:
    return bool(values_of(rows, "efficiency"))


def _panel(mask: str) -> str:
    return f"efficiency, {mask}"


def _name(row: Mapping[str, Any]) -> str:
    groups = "" if row["heads"] == row["kv_heads"] else f" ({row['kv_heads']} KV)"
    return f"{row['heads']} heads{groups} of {row['head_dim']}, {row['dtype']}, {row['degree']} devices"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
