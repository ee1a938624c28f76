"""Speed and memory of a training step against context length, a line for each implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.report.figures import line_figure
from flashtrain.report.rows import OUT_OF_MEMORY, has_failed, status_text, values_of
from flashtrain_recipes.step_benchmark.measure import NO_TIME
from flashtrain_recipes.step_benchmark.tables import best_rows

_MEASURES = ("tokens_per_second", "mfu", "peak_memory_gib")

Rows = Sequence[Mapping[str, Any]]


def context_speed_figure(rows: Rows, path: str | Path) -> Path:
    """Draw tokens/s, MFU and peak memory against context, each implementation at its best batch, as a PNG at `path`.

    Running out of memory is a cross; what was not measured for another reason (no time, not installed) is left out.
    Raises UserError for rows without two contexts.
    """
    shown = [
        row
        for row in best_rows(rows)
        if not has_failed(row) or (status_text(row) == OUT_OF_MEMORY and row.get("status") != NO_TIME)
    ]
    if len(values_of(shown, "context")) < 2:
        raise UserError("no two contexts were measured: there is no curve to draw.")
    measures = [key for key in _MEASURES if values_of(shown, key)]
    groups = ["implementation", *[key for key in ("model", "weights") if len(values_of(shown, key)) > 1]]
    return line_figure(shown, "context", measures, groups, path)
