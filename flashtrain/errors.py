"""What a user is told when something they gave cannot work: one readable line, no traceback.

`python -m flashtrain` prints a UserError's text and exits with a non-zero status; a program that imports flashtrain
catches it as the ValueError it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user gave. Its text is one line: what was given, and what is possible."""


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
    return UserError(f"unknown {kind} '{given}'.{hint} Possible: {choices}.")
