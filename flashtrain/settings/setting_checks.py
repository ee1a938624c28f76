"""The checks that settings share: each raises a UserError of one line that names the setting."""

from __future__ import annotations

from collections.abc import Iterable

from flashtrain.errors import UserError, unknown


def one_of(name: str, given: str, possible: Iterable[str]) -> None:
    """Raise unless `given` is one of the possible names."""
    names = tuple(possible)
    if given not in names:
        raise unknown(name, given, names)


def at_least(name: str, given: float, low: float) -> None:
    """Raise unless `given` is a number not below `low`."""
    if not given >= low:
        raise UserError(f"{name}={given} must be at least {low}.")


def between(name: str, given: float, low: float, high: float, *, include_high: bool = True) -> None:
    """Raise unless `given` lies in [low, high], or in [low, high)."""
    if not (low <= given <= high) or (given == high and not include_high):
        raise UserError(f"{name}={given} must be in [{low}, {high}{']' if include_high else ')'}.")
