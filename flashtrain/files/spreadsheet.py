"""What a spreadsheet takes for a formula, and how a CSV file says that it is text."""

from __future__ import annotations

from typing import Any

from flashtrain.errors import printable

_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def csv_value(value: Any) -> Any:
    """A value as a CSV file holds it: text that a spreadsheet would compute (=SUM(A1:A9)) begins with an apostrophe,
    and its control characters are told as \\x1b. Numbers, also those that are text already (-0.5), stay as they are.
    """
    if not isinstance(value, str) or _is_number(value):
        return value
    formula = value.startswith(_FORMULAS) or value.lstrip().startswith(_FORMULAS)
    return printable(f"'{value}" if formula else value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
