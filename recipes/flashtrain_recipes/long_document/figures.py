"""Score against context: the figure of recipe=long-document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.report.figures import line_figure
from flashtrain.report.rows import Row

_HEIGHT = 4.2
BOUND = "the most that can be expected of a reader of so many tokens"


def documents_figure(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Draw the score (micro-F1, or accuracy) against context, with the bound where it is known. Returns the path.

    Raises UserError for rows of another recipe.
    """
    measure = next((key for key in ("micro_f1", "accuracy") if any(row.get(key) is not None for row in rows)), None)
    if measure is None or not any(row.get("context") for row in rows):
        raise UserError("these rows have no score by context: they are not of recipe=long-document.")
    drawn: list[Row] = [{**row, "series": f"flashtrain, {row.get('model', 'BERT')}"} for row in rows]
    drawn += [
        {"context": row["context"], "series": BOUND, measure: row["best_micro_f1"]}
        for row in rows
        if row.get("best_micro_f1") is not None
    ]
    samples = {row["samples"] for row in rows if row.get("samples")}
    title = f"{samples.pop():,} texts trained on at every context" if len(samples) == 1 else ""
    return line_figure(drawn, "context", measure, "series", path, title=title, height=_HEIGHT, log_y=False)
