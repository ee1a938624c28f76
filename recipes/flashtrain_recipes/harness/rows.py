"""The rows of a result, with the words for what could not be measured, and comparisons between rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flashtrain.folders.run_folder import FAILED, OUT_OF_MEMORY
from flashtrain.report.rows import Row, has_failed, status_text, values_of

__all__ = ["FAILED", "MISSING", "NO_TIME", "OUT_OF_MEMORY", "Row", "Rows", "case_line", "empty_row", "over_fastest"]

NO_TIME, MISSING = "no time left", "not available"  # besides FAILED and OUT_OF_MEMORY: the status of an empty row

Rows = Sequence[Mapping[str, Any]]


def empty_row(columns: Row, status: str, reason: str | None = None) -> Row:
    """The row of a baseline without a figure. columns: its own and the case's; reason: more than the status says."""
    return {**columns, "status": status, **({} if reason is None else {"error": reason})}


def over_fastest(
    row: Mapping[str, Any],
    rows: Rows,
    rate: str,
    same: Iterable[str],
    among: Callable[[Mapping[str, Any]], bool] = lambda row: True,
) -> float | None:
    """The row's rate over that of the fastest of the rows that `among` takes and that agree with it in the columns
    `same`; None where either has none."""
    keys = list(same)
    comparable = [one for one in rows if among(one) and all(one.get(key) == row.get(key) for key in keys)]
    fastest = max((one.get(rate) or 0.0 for one in comparable), default=0.0)
    return round(row[rate] / fastest, 3) if fastest and row.get(rate) else None


def case_line(rows: Rows, rate: str) -> str:
    """One case's rows in a line: the rates of each baseline, or what happened to it."""
    parts = []
    for title in values_of(rows, "implementation"):
        own = [row for row in rows if row["implementation"] == title]
        measured = [f"{row[rate]:,.4g}" for row in own if row.get(rate) is not None]
        found = measured + [status_text(row) for row in own if has_failed(row)]
        parts.append(f"{title} {'/'.join(dict.fromkeys(found))}")
    return f"{rate}: {'; '.join(parts)}" if parts else "nothing could be measured"
