"""The rows of a result: the statuses of what was not measured, and the
columns that compare rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flashtrain.report.rows import Row, Rows, has_failed, status_text, values_of

# Besides FAILED and OUT_OF_MEMORY (run_folder.py): the status of an empty row.
NO_TIME, MISSING = "no time left", "not available"


def empty_row(columns: Row, status: str, reason: str | None = None) -> Row:
    """Return the row of a baseline that was not measured.

    Args:
        columns: the row's first columns (Baseline.columns).
        status: why, in words that tables show: FAILED, MISSING, NO_TIME or OUT_OF_MEMORY.
        reason: details for the column `error`; None: the status says enough.
    """
    return {**columns, "status": status, **({} if reason is None else {"error": reason})}


@dataclass(frozen=True)
class Over:
    """A column that divides a row's rate by the highest rate among the rows
    that it is compared with."""

    column: str  # its name; the value is None where there is no row to compare with
    rate: str  # the column whose values are divided
    same: tuple[str, ...]  # columns in which the compared rows must be equal
    baseline: Callable[[Mapping[str, Any]], bool]  # returns whether a row may be compared with
    # Whether a row with a rate gets the column.
    ours: Callable[[Mapping[str, Any]], bool] = lambda row: True

    def of(self, row: Mapping[str, Any], rows: Rows) -> Row:
        """Return {column: quotient} of `row`, compared with the rows of `rows` that are alike; {}
        where `row` has no rate, or is not one of `ours`."""
        if not (row.get(self.rate) and self.ours(row)):
            return {}
        alike = (
            one
            for one in rows
            if self.baseline(one) and all(one.get(key) == row.get(key) for key in self.same)
        )
        fastest = max((one.get(self.rate) or 0.0 for one in alike), default=0.0)
        return {self.column: round(row[self.rate] / fastest, 3) if fastest else None}


def case_line(rows: Rows, rate: str) -> str:
    """Return one line that lists, by baseline, the values of column `rate` in a case's rows,
    or why there are none."""
    parts = []
    for title in values_of(rows, "implementation"):
        own = [row for row in rows if row["implementation"] == title]
        measured = [f"{row[rate]:,.4g}" for row in own if row.get(rate) is not None]
        found = measured + [status_text(row) for row in own if has_failed(row)]
        parts.append(f"{title} {'/'.join(dict.fromkeys(found))}")
    return f"{rate}: {'; '.join(parts)}" if parts else "nothing could be measured"
