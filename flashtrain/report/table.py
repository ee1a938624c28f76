"""Tables of result rows: as text, Markdown and CSV, long or wide (a column for each value of a key)."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from flashtrain.announce import is_quiet
from flashtrain.errors import UserError, unknown
from flashtrain.report.formats import COLUMNS, MISSING, NOT_SHOWN, cell, heading, one_line
from flashtrain.report.rows import Row, has_failed, status_text, values_of

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
        check_columns([*self.columns, self.pivot, self.value], present)
        return make_table(pivoted(kept, self.columns, self.pivot, self.value), _columns(self, kept), title)

    def kept(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The rows that `only` asks for. Raises UserError for keys that they lack, and where no row is left."""
        check_columns(self.only, available_columns(rows))
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
        cells = places.setdefault(tuple(row.get(key) for key in index), {})
        found = status_text(row) if has_failed(row) else row.get(value)
        if found is not None and row.get(pivot) is not None:
            cells.setdefault(str(row[pivot]), []).append(found)
    return [
        {**dict(zip(index, place, strict=True)), **{name: _middle(found) for name, found in cells.items()}}
        for place, cells in places.items()
    ]


def _columns(view: View, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [*(view.columns or []), *[str(name) for name in values_of(rows, str(view.pivot))]]


def _middle(found: list[Any]) -> Any:
    numbers = [v for v in found if isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)]
    return statistics.median(numbers) if numbers else found[0]


def _is(value: Any, text: str) -> bool:
    """Whether a value is what a user wrote: 0.1 for 0.1, 64 for 64, causal for causal."""
    return str(value) == text or (isinstance(value, float) and f"{value:g}" == text)


# An error in a line below the table: long enough for its meaning, short enough to stay a line.
_ERROR_LENGTH = 200

# Characters. A heading of several words takes several lines, so that a sweep's table fits a terminal of 80 columns.
_HEADING_WIDTH = 11
_UNLIMITED = 100_000


@dataclass(frozen=True)
class Table:
    """A finished table. rows hold the values as measured (CSV), `cells` the texts that readers see (the rest)."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    title: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def headings(self) -> list[str]:
        """The heading of every column, with its unit."""
        return [heading(column) for column in self.columns]

    @property
    def cells(self) -> list[list[str]]:
        """Every row's texts, one a column."""
        return [[cell(column, row.get(column)) for column in self.columns] for row in self.rows]

    def markdown(self) -> str:
        """The table as GitHub Markdown, numbers to the right, failures in a list below it; ends with a newline."""
        rule = ["---:" if self._is_numeric(column) else ":---" for column in self.columns]
        lines = [self.headings, rule, *self.cells]
        text = "\n".join("| " + " | ".join(markdown_text(part) for part in line) + " |" for line in lines) + "\n"
        if self.notes:
            text += "\n" + "".join(f"- {markdown_text(note)}\n" for note in self.notes)
        return text

    def csv(self) -> str:
        """The values as measured, under their keys, missing ones empty; an error column where a row has one."""
        columns = list(self.columns)
        if "error" not in columns and any(row.get("error") is not None for row in self.rows):
            columns.append("error")
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(self.rows)
        return buffer.getvalue()

    def print(self, console: Console | None = None) -> None:
        """Print the table on the terminal, unless a notebook is to stay quiet. No figure is ever cut: what is too wide
        runs past the terminal's edge."""
        if console is None and is_quiet():
            return
        console = console or Console()
        title = Text(one_line(self.title)) if self.title else None
        drawn = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for column, text in zip(self.columns, self.headings, strict=True):
            numeric = self._is_numeric(column)
            # headings are wrapped here, word by word: rich would wrap the numbers below them too
            lines = textwrap.wrap(text, _HEADING_WIDTH, break_long_words=False)
            drawn.add_column(
                Text("\n".join(lines)),
                justify="right" if numeric else "left",
                no_wrap=numeric,
                min_width=max(len(line) for line in lines),
                overflow="fold",
            )
        for row, cells in zip(self.rows, self.cells, strict=True):
            drawn.add_row(*[Text(part) for part in cells], style="red" if has_failed(row) else None)
        needed = Measurement.get(console, console.options.update(width=_UNLIMITED), drawn)
        width = console.width
        console.width = max(width, needed.minimum if console.is_terminal else needed.maximum, len(self.title))
        try:
            console.print(drawn, crop=False)
        finally:
            console.width = width
        for note in self.notes:
            console.print(Text(note), style="red", soft_wrap=True)

    def _is_numeric(self, column: str) -> bool:
        values = [row[column] for row in self.rows if row.get(column) is not None]
        return bool(values) and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def make_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None, title: str = "") -> Table:
    """The table of `rows`.

    columns: keys, in order. Without them, every key that has a value, known ones first in the order of COLUMNS.
    Where a row has failed, a column "status" is added. Raises UserError for a column that no row has.
    """
    if not rows:
        raise UserError("there are no rows to make a table of.")
    shown = [dict(row) for row in rows]
    present = available_columns(shown)
    if columns is None:
        chosen = [key for key in present if _shown(shown, key) and key != "status" and values_of(shown, key)]
    else:
        chosen = list(dict.fromkeys(columns))
        # A known column may have no value in these rows (a CPU run has no MFU); only a name nobody knows is a typo.
        check_columns([column for column in chosen if column not in COLUMNS], present)
    failed = [row for row in shown if has_failed(row)]
    if failed and "status" not in chosen:
        chosen.append("status")
    if "status" in chosen:
        for row in shown:
            row["status"] = status_text(row)
    notes = [f"{_row_name(row, chosen)}: {status_text(row)}{_error(row)}" for row in failed]
    return Table(tuple(chosen), tuple(shown), title, tuple(notes))


def available_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every key of the rows: known ones in the order of COLUMNS, then the others as they first appear."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return [key for key in COLUMNS if key in keys] + [key for key in keys if key not in COLUMNS]


def check_columns(keys: Iterable[str], present: Sequence[str]) -> None:
    """Raise UserError for a key that is not among the rows' columns."""
    for key in keys:
        if key not in present:
            raise unknown("column", key, present)


def constants(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    """ "key value" for each of `keys` that has one and the same value in every row that has it."""
    found = [(key, values_of(rows, key)) for key in keys]
    return [f"{heading(key)} {cell(key, values[0])}" for key, values in found if len(values) == 1]


def _shown(rows: Sequence[Row], key: str) -> bool:
    """Whether a column stands in a table for which nobody chose the columns."""
    return key not in NOT_SHOWN or (key == "error" and not any(isinstance(row.get(key), str) for row in rows))


def _row_name(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """What tells a failed row from the others: the first cells that it has."""
    parts = [f"{heading(key)} {cell(key, row[key])}" for key in columns if key != "status" and row.get(key) is not None]
    return ", ".join(parts[:4]) or str(row.get("run") or "a row")


def _error(row: Mapping[str, Any]) -> str:
    text = cell("error", row.get("error"))
    if text == MISSING or not isinstance(row.get("error"), str):
        return ""
    return f" ({text if len(text) <= _ERROR_LENGTH else text[: _ERROR_LENGTH - 3] + '...'})"


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is, in one line: no column break, HTML tag, code span, link or picture."""
    return re.sub(r"([\\|`\[\]])", r"\\\1", one_line(text)).replace("<", "&lt;")
