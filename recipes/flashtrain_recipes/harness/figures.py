"""The line figures that benchmarks draw from their rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.report.figures import line_figure
from flashtrain.report.rows import values_of
from flashtrain_recipes.harness.rows import Rows


def curves(
    rows: Rows, x: str, measures: str | Sequence[str], path: str | Path, *, apart: Sequence[str] = (), **options: Any
) -> Path:
    """Draw columns of the rows against column `x` as a PNG: a panel per measure, a line per implementation.

    Args:
        measures: the columns to draw.
        apart: further columns; rows that differ in one are drawn as separate lines.
        options: keyword arguments of flashtrain.report.figures.line_figure.

    Raises:
        UserError: the rows have fewer than two values of x.
    """
    if len(values_of(rows, x)) < 2:
        raise UserError(f"no two values of {x} were measured: there is no curve to draw.")
    group = ["implementation", *(key for key in apart if len(values_of(rows, key)) > 1)]
    return line_figure(rows, x, measures, group, path, **options)
