"""What a user is told when something they gave cannot work, in one readable line; and the checks that settings share.

`python -m flashtrain` prints a UserError's text and exits with a non-zero status; a program that imports flashtrain
catches it as the ValueError it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

LONGEST_LINE = 2000  # characters of a UserError: a file's own line may be in it


class UserError(ValueError):
    """A mistake in what the user gave. Its text is one line: what was given, and what is possible.

    Too long a line, of a file's own text, is cut. status: what a command exits with.
    """

    status = 2

    def __init__(self, text: str = "") -> None:
        line = " ".join(text.splitlines())
        super().__init__(line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ...")


def unknown(kind: str, given: str, possible: Iterable[str], *, listed: Iterable[str] | None = None) -> UserError:
    """The error for a name that does not exist, with the nearest existing names when there are any.

    kind: what the name stands for, in the singular ("recipe", "model size").
    listed: the names to print where printing all possible ones would be too long to read.
    Returned, not raised, so that the caller's `raise` stays visible.
    """
    names = sorted(possible)
    near = difflib.get_close_matches(given, names, n=2, cutoff=0.6)
    hint = f" Did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
    choices = ", ".join(names if listed is None else sorted(listed)) or "none exist"
    several = " Add -m to run several." if "," in given else ""
    return UserError(f"unknown {kind} '{given}'.{hint}{several} Possible: {choices}.")


def first_line(error: BaseException, longest: int = 300) -> str:
    """What an exception says in its first line, without the period at its end; its type where it says nothing."""
    words = str(error).strip().split("\n", 1)[0].split()
    return " ".join(words)[:longest].rstrip(".") or type(error).__name__


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that led to it, the latest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class RunFailed(Exception):
    """A run failed where the user can mend nothing: one line, without a traceback, and exit status 1."""

    status = 1


def one_of(name: str, given: str, possible: Iterable[str]) -> None:
    """Raise unless `given` is one of the possible names."""
    names = tuple(possible)
    if given not in names:
        raise unknown(name, given, names)


def at_least(name: str, given: float | None, low: float) -> None:
    """Raise unless `given` is a number not below `low`, or None, which leaves it open."""
    if given is not None and not given >= low:
        raise UserError(f"{name}={given} must be at least {low}.")


def above(name: str, given: float | None, low: float) -> None:
    """Raise unless `given` is a number above `low`, or None, which leaves it open."""
    if given is not None and not given > low:
        raise UserError(f"{name}={given} must be above {low}.")


def between(
    name: str, given: float | None, low: float, high: float, *, include_low: bool = True, include_high: bool = True
) -> None:
    """Raise unless `given` lies in [low, high], an end that is not included excepted, or is None."""
    if given is None or low < given < high or (given == low and include_low) or (given == high and include_high):
        return
    begin, end = "[" if include_low else "(", "]" if include_high else ")"
    raise UserError(f"{name}={given} must be in {begin}{low}, {high}{end}.")
