"""The curves that benchmarks draw of their rows."""

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
    """Draw the measures against x as a PNG, a panel for each measure and a line for each implementation.

    Args:
        apart: columns in which rows that differ are lines of their own.
        options: as for flashtrain.report.line_figure.

    Raises:
        UserError: the rows have no two values of x.
    """
    if len(values_of(rows, x)) < 2:
        raise UserError(f"no two values of {x} were measured: there is no curve to draw.")
    group = ["implementation", *(key for key in apart if len(values_of(rows, key)) > 1)]
    return line_figure(rows, x, measures, group, path, **options)
