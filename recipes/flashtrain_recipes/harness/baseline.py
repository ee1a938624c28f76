"""What is measured (a case), and an implementation that is measured on it (a baseline; flashtrain's own is one)."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

from flashtrain.errors import one_of
from flashtrain_recipes.harness.rows import Row


class Case(Protocol):
    """One thing that every baseline is measured on. str(case) names it in a line. Cases are hashable."""

    def columns(self) -> Row:
        """The case as the columns of a row."""


class Baseline(ABC):
    """One implementation. name: in benchmark.implementations. title: in tables. compiled: by torch.compile.

    Each family extends this class by how its baselines are called.
    """

    name: str
    title: str
    compiled: bool = False

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot be used on this device at all; None where it can."""
        return None

    def applies(self, case: Any) -> bool:
        """False where the case does not concern this baseline: it is left out without a note."""
        return True

    def refuses(self, case: Any) -> str | None:
        """What of the case it does not support, in words; None where it may be tried."""
        return None

    def columns(self, case: Any) -> Row:
        """What every row of it at the case begins with; case None: of one that this machine does not have."""
        return {"implementation": self.title, **({} if case is None else case.columns())}

    def within(self) -> AbstractContextManager[object]:
        """Entered around everything that is computed with it."""
        return nullcontext()


B = TypeVar("B", bound=Baseline)


def choose(everyone: Sequence[B], names: Sequence[str] | None, device: torch.device) -> tuple[list[B], dict[B, str]]:
    """(the named baselines that this device can have, {each that it cannot have: why}). names None: all.

    Raises UserError for the first name that none has.
    """
    known = list(dict.fromkeys(one.name for one in everyone))
    for name in names or ():
        one_of("benchmark.implementations", name, known)
    named = [one for one in everyone if names is None or one.name in names]
    missing = {one: reason for one in named if (reason := one.missing(device)) is not None}
    return [one for one in named if one not in missing], missing
