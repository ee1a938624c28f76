"""The rows of a result, with the words for what could not be measured, and comparisons between rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashtrain.folders.run_folder import FAILED, OUT_OF_MEMORY
from flashtrain.report.rows import Row, has_failed, status_text, values_of

__all__ = ["FAILED", "MISSING", "NO_TIME", "OUT_OF_MEMORY", "Over", "Row", "Rows", "case_line", "empty_row"]

NO_TIME, MISSING = "no time left", "not available"  # besides FAILED and OUT_OF_MEMORY: the status of an empty row

Rows = Sequence[Mapping[str, Any]]


def empty_row(columns: Row, status: str, reason: str | None = None) -> Row:
    """Return the row of a baseline without a figure.

    Args:
        columns: the baseline's own and the case's.
        reason: more than the status says.
    """
    return {**columns, "status": status, **({} if reason is None else {"error": reason})}


@dataclass(frozen=True)
class Over:
    """A column that compares a row's rate with that of the fastest baseline at the same case.

    Attributes:
        column: its name; rows without a counterpart have None there.
        rate: the column that is compared.
        same: columns in which the compared rows agree.
        baseline: whether a row is compared with.
        ours: whether a row gets the column; rows without a rate never do.
    """

    column: str
    rate: str
    same: tuple[str, ...]
    baseline: Callable[[Mapping[str, Any]], bool]
    ours: Callable[[Mapping[str, Any]], bool] = lambda row: True

    def of(self, row: Mapping[str, Any], rows: Rows) -> Row:
        """Return the column of one of the rows; nothing for a row that does not get it."""
        if not (row.get(self.rate) and self.ours(row)):
            return {}
        alike = (one for one in rows if self.baseline(one) and all(one.get(key) == row.get(key) for key in self.same))
        fastest = max((one.get(self.rate) or 0.0 for one in alike), default=0.0)
        return {self.column: round(row[self.rate] / fastest, 3) if fastest else None}


def case_line(rows: Rows, rate: str) -> str:
    """Return one case's rows in a line: the rates of each baseline, or what happened to it."""
    parts = []
    for title in values_of(rows, "implementation"):
        own = [row for row in rows if row["implementation"] == title]
        measured = [f"{row[rate]:,.4g}" for row in own if row.get(rate) is not None]
        found = measured + [status_text(row) for row in own if has_failed(row)]
        parts.append(f"{title} {'/'.join(dict.fromkeys(found))}")
    return f"{rate}: {'; '.join(parts)}" if parts else "nothing could be measured"
