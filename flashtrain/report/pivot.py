"""Wide tables: some of the rows, with one column for each value of a key (a column for each implementation, say)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashtrain.errors import UserError, unknown
from flashtrain.report.formats import cell, is_finite
from flashtrain.report.rows import Row, has_failed, status_text, values_of
from flashtrain.report.table import Table, available_columns, make_table

# The words that a README's marker and the report command share.
OPTIONS = ("columns", "pivot", "value", "only")


@dataclass(frozen=True)
class View:
    """How rows become a table.

    columns: keys in order, or None for all that have values. only: keys and the texts of the values that are kept.
    pivot and value: instead of the columns of these names, a column for each value of `pivot` that holds `value`.
    """

    columns: list[str] | None = None
    pivot: str | None = None
    value: str | None = None
    only: dict[str, str] = field(default_factory=dict)

    def table(self, rows: Sequence[Mapping[str, Any]], title: str = "") -> Table:
        """The table of these rows. Raises UserError for keys that they lack, and where no row is left."""
        present, kept = available_columns(rows), self.kept(rows)
        if self.pivot is None:
            return make_table(kept, self.columns, title)
        if self.columns is None or self.value is None:
            raise UserError("a pivot needs columns=a,b (what tells its rows apart) and value=c (what its cells hold).")
        for key in (*self.columns, self.pivot, self.value):
            if key not in present:
                raise unknown("column", key, present)
        return make_table(pivoted(kept, self.columns, self.pivot, self.value), _columns(self, kept), title)

    def kept(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The rows that `only` asks for. Raises UserError for keys that they lack, and where no row is left."""
        present = available_columns(rows)
        for key in self.only:
            if key not in present:
                raise unknown("column", key, present)
        kept = [row for row in rows if all(_is(row.get(key), text) for key, text in self.only.items())]
        if not kept:
            raise UserError(f"no row has {', '.join(f'{key} {text}' for key, text in self.only.items())}.")
        return kept


def view_of(options: Mapping[str, str]) -> View:
    """A view from the texts of OPTIONS: columns=a,b pivot=c value=d only=e:text,f:text. Raises UserError."""
    for key in options:
        if key not in OPTIONS:
            raise unknown("table option", key, OPTIONS)
    columns = [name.strip() for name in options.get("columns", "").split(",") if name.strip()]
    pairs = [part.partition(":") for part in options.get("only", "").split(",") if part]
    for key, colon, text in pairs:
        if not (key and colon and text):
            raise UserError(
                f"only={options['only']} must be pairs key:value, as in only=direction:forward,head_dim:64."
            )
    return View(columns or None, options.get("pivot"), options.get("value"), {key: text for key, _, text in pairs})


def pivoted(rows: Sequence[Mapping[str, Any]], index: Sequence[str], pivot: str, value: str) -> list[Row]:
    """One row for each combination of the index's values, in their first order, with a key for each value of `pivot`.

    Several values for one place give their median; a failed row gives what happened in words.
    """
    places: dict[tuple[Any, ...], dict[str, list[Any]]] = {}
    for row in rows:
        cells = places.setdefault(tuple(_plain(key, row.get(key)) for key in index), {})
        found = status_text(row) if has_failed(row) else row.get(value)
        if found is not None and row.get(pivot) is not None:
            cells.setdefault(str(row[pivot]), []).append(found)
    return [
        {**dict(zip(index, place, strict=True)), **{name: _middle(found) for name, found in cells.items()}}
        for place, cells in places.items()
    ]


def _plain(key: str, value: Any) -> Any:
    """The value, or its words where it is a list or a mapping."""
    return cell(key, value) if isinstance(value, (list, tuple, dict)) else value


def _columns(view: View, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [*(view.columns or []), *[str(name) for name in values_of(rows, str(view.pivot))]]


def _middle(found: list[Any]) -> Any:
    numbers = [v for v in found if isinstance(v, (int, float)) and not isinstance(v, bool) and is_finite(v)]
    return statistics.median(numbers) if numbers else found[0]


def _is(value: Any, text: str) -> bool:
    """Whether a value is what a user wrote: 0.1 for 0.1, 64 for 64, causal for causal."""
    return str(value) == text or (isinstance(value, float) and f"{value:g}" == text)
