"""Errors that a user can act on, and the checks of values that raise them.

`python -m flashtrain` prints a UserError's text as one line and exits with its status; in a program
that imports flashtrain it is a ValueError.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

MAX_LINE = 2000  # characters of a UserError, which may quote a line of a file


class UserError(ValueError):
    """A mistake in the user's input. Its text is one line: what was given, what
    is expected, what to do.

    `status` is the exit status of a command that ends with this error.
    """

    status = 2

    def __init__(self, text: str = "") -> None:
        line = " ".join(text.splitlines())
        super().__init__(line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} ...")


def unknown(
    kind: str, given: str, possible: Iterable[str], *, listed: Iterable[str] | None = None
) -> UserError:
    """Return (not raise) the error for a name that does not exist; it suggests similar names.

    Args:
        kind: what the name stands for, in the singular ("recipe", "model size").
        given: the name.
        possible: all names that exist.
        listed: the names to print in the message; None: all that exist.
    """
    names = sorted(possible)
    near = difflib.get_close_matches(given, names, n=2, cutoff=0.6)
    hint = f" Did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
    choices = ", ".join(names if listed is None else sorted(listed))
    expected = f"Expected one of: {choices}" if choices else "None exist"
    several = " Add -m to run several." if "," in given else ""
    return UserError(f"unknown {kind} '{given}'.{hint}{several} {expected}.")


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, without a period at its end; its
    type if it has no text."""
    words = str(error).strip().split("\n", 1)[0].split()
    return " ".join(words)[:300].rstrip(".") or type(error).__name__


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes, the last raised one first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class RunFailed(Exception):
    """The error of a run that failed through no mistake of the user's: one line, no
    traceback, exit status 1."""

    status = 1


@contextmanager
def needs_package(what: str, package: str, extra: str) -> Iterator[None]:
    """Raise UserError if an import inside the `with` block fails.

    Args:
        what: What needs the package, as text, such as a setting with its value.
        package: The package's name.
        extra: flashtrain's extra that installs the package.
    """
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"{what} needs the package {package}: pip install 'flashtrain[{extra}]' ({error})."
        ) from error


def one_of(name: str, given: str, possible: Iterable[str]) -> None:
    """Raise UserError unless `given` is one of the possible names."""
    names = tuple(possible)
    if given not in names:
        raise unknown(name, given, names)


def at_least(name: str, given: float | None, low: float) -> None:
    """Raise UserError unless `given` is at least `low`, or None (not set)."""
    if given is not None and not given >= low:
        raise UserError(f"{name}={given} must be at least {low}.")


def above(name: str, given: float | None, low: float) -> None:
    """Raise UserError unless `given` is above `low`, or None (not set)."""
    if given is not None and not given > low:
        raise UserError(f"{name}={given} must be above {low}.")


def between(
    name: str,
    given: float | None,
    low: float,
    high: float,
    *,
    include_low: bool = True,
    include_high: bool = True,
) -> None:
    """Raise UserError unless `given` lies between `low` and `high`, or is None (not set)."""
    if (
        given is None
        or low < given < high
        or (given == low and include_low)
        or (given == high and include_high)
    ):
        return
    begin, end = "[" if include_low else "(", "]" if include_high else ")"
    raise UserError(f"{name}={given} must be in {begin}{low}, {high}{end}.")
