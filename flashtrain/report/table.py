"""Make tables of rows, and print them on a terminal or as Markdown."""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from flashtrain.announce import is_quiet
from flashtrain.errors import UserError, unknown
from flashtrain.report.formats import COLUMNS, MISSING, NOT_SHOWN, cell, heading, one_line
from flashtrain.report.rows import Row, has_failed, status_text, values_of

# Options of a README's marker and of the report command.
OPTIONS = ("columns", "pivot", "value", "only")
_ERROR_LENGTH = 200  # characters of an error in a line below the table
# Characters; longer headings are wrapped, so that a sweep's table fits a terminal of 80 columns.
_HEADING_WIDTH = 11


@dataclass(frozen=True)
class View:
    """A choice of rows and columns for a table."""

    columns: list[str] | None = None  # keys of the columns, in order; None: all keys with values
    pivot: str | None = None  # a key, every value of which becomes a column ...
    value: str | None = None  # ... whose cells hold the values of this key
    # key -> text of the value that a row must have.
    only: dict[str, str] = field(default_factory=dict)

    def table(self, rows: Sequence[Mapping[str, Any]]) -> Table:
        """Make the table of the chosen rows and columns. Raises UserError if a chosen key is in no
        row, or no row is chosen."""
        present, selected = available_columns(rows), self.selected(rows)
        if self.pivot is None:
            return make_table(selected, self.columns)
        if self.columns is None or self.value is None:
            raise UserError(
                "pivot=KEY needs columns=a,b (the other keys) and value=c (whose "
                "values fill the cells)."
            )
        check_columns([*self.columns, self.pivot, self.value], present)
        names = [str(name) for name in values_of(selected, self.pivot)]
        return make_table(
            pivoted(selected, self.columns, self.pivot, self.value), [*self.columns, *names]
        )

    def selected(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the rows that match `only`. Raises UserError if a key of `only` is in no row, or
        no row matches."""
        check_columns(self.only, available_columns(rows))
        selected = [
            row for row in rows if all(_is(row.get(key), text) for key, text in self.only.items())
        ]
        if not selected:
            raise UserError(
                f"no row has {', '.join(f'{key}={text}' for key, text in self.only.items())}. "
                "Expected values of these rows in only=KEY:VALUE."
            )
        return selected


def view_of(options: Mapping[str, str]) -> View:
    """Make a view from options such as columns=a,b pivot=c value=d only=e:text. Raises UserError
    for an unknown option."""
    for key in options:
        if key not in OPTIONS:
            raise unknown("table option", key, OPTIONS)
    columns = [name.strip() for name in options.get("columns", "").split(",") if name.strip()]
    pairs = [part.partition(":") for part in options.get("only", "").split(",") if part]
    for key, colon, text in pairs:
        if not (key and colon and text):
            raise UserError(
                f"only={options['only']}: "
                "expected pairs key:value, as in only=direction:forward,head_dim:64."
            )
    return View(
        columns or None,
        options.get("pivot"),
        options.get("value"),
        {key: text for key, _, text in pairs},
    )


def pivoted(
    rows: Sequence[Mapping[str, Any]], index: Sequence[str], pivot: str, value: str
) -> list[Row]:
    """Return a row for each combination of the `index` keys' values, with a key for
    each value of `pivot`.

    Under that key is the value of the key `value` in the row with these values; the median if there
    are several such rows, the status if the row has failed.
    """
    places: dict[tuple[Any, ...], dict[str, list[Any]]] = {}
    for row in rows:
        cells = places.setdefault(tuple(row.get(key) for key in index), {})
        found = status_text(row) if has_failed(row) else row.get(value)
        if found is not None and row.get(pivot) is not None:
            cells.setdefault(str(row[pivot]), []).append(found)
    return [
        {
            **dict(zip(index, place, strict=True)),
            **{name: _middle(found) for name, found in cells.items()},
        }
        for place, cells in places.items()
    ]


def _middle(found: list[Any]) -> Any:
    numbers = [
        v
        for v in found
        if isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)
    ]
    return statistics.median(numbers) if numbers else found[0]


def _is(value: Any, text: str) -> bool:
    """Return whether a row's value is the one that a command writes as this text: 0.1, 64 or
    causal; of !TEXT, whether it does not contain TEXT."""
    if text.startswith("!"):
        return text[1:] not in str(value)
    return str(value) == text or (isinstance(value, float) and f"{value:g}" == text)


@dataclass(frozen=True)
class Table:
    """A table of rows."""

    columns: tuple[str, ...]  # keys of the columns, in order
    rows: tuple[Row, ...]  # with values by key
    title: str = ""  # text above the table
    notes: tuple[str, ...] = ()  # lines below the table, which name failed rows

    @property
    def headings(self) -> list[str]:
        """The heading of every column, with its unit."""
        return [heading(column) for column in self.columns]

    @property
    def cells(self) -> list[list[str]]:
        """The text of every cell, row by row."""
        return [[cell(column, row.get(column)) for column in self.columns] for row in self.rows]

    @property
    def width(self) -> int:
        """The characters of a printed line, if no text is folded."""
        columns = zip(map(_wrapped, self.headings), *self.cells, strict=True)
        widths = [max(map(len, [*lines, *cells])) for lines, *cells in columns]
        return sum(widths) + 2 * len(widths)

    def markdown(self) -> str:
        """Return the table as GitHub Markdown, numbers right-aligned, with a
        list of failures below it."""
        rule = ["---:" if self.is_numeric(column) else ":---" for column in self.columns]
        lines = [self.headings, rule, *self.cells]
        joined = (" | ".join(markdown_text(part) for part in line) for line in lines)
        text = "".join(f"| {line} |\n" for line in joined)
        if self.notes:
            text += "\n" + "".join(f"- {markdown_text(note)}\n" for note in self.notes)
        return text

    def print(self, console: Console | None = None) -> None:
        """Print the table on the terminal, unless output is quiet."""
        if console is None and is_quiet():
            return
        console = console or Console()
        drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for column, text, *cells in zip(self.columns, self.headings, *self.cells, strict=True):
            numeric = self.is_numeric(column)
            lines = _wrapped(text)
            # No number is ever cut: a table that is too wide runs past the terminal's edge.
            uncut = cells if numeric or not console.is_terminal else []
            drawn.add_column(
                Text("\n".join(lines)),
                justify="right" if numeric else "left",
                min_width=max(map(len, [*lines, *uncut])),
                overflow="fold",
            )
        for row, cells in zip(self.rows, self.cells, strict=True):
            drawn.add_row(*map(Text, cells), style="red" if has_failed(row) else None)
        if self.title:
            console.print(Text(one_line(self.title)), soft_wrap=True)
        console.print(drawn, crop=False)
        for note in self.notes:
            console.print(Text(note), style="red", soft_wrap=True)

    def is_numeric(self, column: str) -> bool:
        """Return whether the column has values, and all of them are numbers."""
        values = [row[column] for row in self.rows if row.get(column) is not None]
        return bool(values) and all(
            isinstance(value, (int, float)) and not isinstance(value, bool) for value in values
        )


def _wrapped(text: str) -> list[str]:
    """Return a heading's lines, by words: rich would also wrap the numbers below them."""
    return textwrap.wrap(text, _HEADING_WIDTH, break_long_words=False)


def make_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None, title: str = ""
) -> Table:
    """Make the table of `rows`, with a column "status" if a row has failed.

    Args:
        rows: flat dictionaries.
        columns: keys of the columns, in order; None: all keys with a value, known keys first
            in the order of COLUMNS.
        title: text above the table.

    Raises:
        UserError: a column is neither in COLUMNS nor a key of any row.
    """
    shown = [dict(row) for row in rows]
    present = available_columns(shown)
    if columns is None:
        chosen = [
            key
            for key in present
            if _shown(shown, key) and key != "status" and values_of(shown, key)
        ]
    else:
        chosen = list(dict.fromkeys(columns))
        # A known column may have no value in these rows (a CPU run has no MFU); an
        # unknown name is a typo.
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
    """Return all keys of the rows: known keys in the order of COLUMNS, then the
    others as they first appear."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return [key for key in COLUMNS if key in keys] + [key for key in keys if key not in COLUMNS]


def check_columns(keys: Iterable[str], present: Sequence[str]) -> None:
    """Raise UserError if one of `keys` is not in `present`, the keys of the rows."""
    for key in keys:
        if key not in present:
            raise unknown("column", key, present)


def constants(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    """Return a text "heading value" for each of `keys` that has a single value in all rows."""
    found = [(key, values_of(rows, key)) for key in keys]
    return [f"{heading(key)} {cell(key, values[0])}" for key, values in found if len(values) == 1]


def _shown(rows: Sequence[Row], key: str) -> bool:
    """Return whether a table without given columns has a column for this key."""
    return key not in NOT_SHOWN or (
        key == "error" and not any(isinstance(row.get(key), str) for row in rows)
    )


def _row_name(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Return a text that names a failed row: the headings and values of its first cells."""
    parts = [
        f"{heading(key)} {cell(key, row[key])}"
        for key in columns
        if key != "status" and row.get(key) is not None
    ]
    return ", ".join(parts[:4]) or str(row.get("run") or "a row")


def _error(row: Mapping[str, Any]) -> str:
    text = cell("error", row.get("error"))
    if text == MISSING or not isinstance(row.get("error"), str):
        return ""
    return f" ({text if len(text) <= _ERROR_LENGTH else text[: _ERROR_LENGTH - 3] + '...'})"


def markdown_text(text: str) -> str:
    """Return the text in one line, escaped so that Markdown shows it literally,
    also in a table's cell."""
    return re.sub(r"([\\|`\[\]])", r"\\\1", one_line(text)).replace("<", "&lt;")
