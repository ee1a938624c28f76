"""A case, and a baseline: an implementation that is measured on it (flashtrain's own is one)."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

from flashtrain.errors import one_of
from flashtrain_recipes.harness.rows import Row

B = TypeVar("B", bound="Baseline")


class Case(Protocol):
    """What every baseline is measured on: hashable, and str(case) names it in a line."""

    def columns(self) -> Row:
        """Return the case as the columns of a row."""


class Baseline(ABC):
    """One implementation. Each family adds how its baselines are called."""

    name: str  # in benchmark.implementations
    title: str  # in tables
    compiled: bool = False  # by torch.compile

    def missing(self, device: torch.device) -> str | None:
        """Return why the device cannot have it at all; None where it can."""
        return None

    def applies(self, case: Any) -> bool:
        """Whether the case concerns this baseline; if not, it is left out without a note."""
        return True

    def refuses(self, case: Any) -> str | None:
        """Return what of the case it does not support, in words; None where it may be tried."""
        return None

    def columns(self, case: Any) -> Row:
        """Return what its rows at the case begin with; case None: this machine does not have it."""
        return {"implementation": self.title, **({} if case is None else case.columns())}

    def within(self) -> AbstractContextManager[object]:
        """Return what is entered around all that it computes."""
        return nullcontext()


def choose(everyone: Sequence[B], names: Sequence[str] | None, device: torch.device) -> tuple[list[B], dict[B, str]]:
    """Return (the named baselines that this device can have, {each that it cannot have: why}).

    Args:
        names: None: all.

    Raises:
        UserError: no baseline has one of the names.
    """
    known = list(dict.fromkeys(one.name for one in everyone))
    for name in names or ():
        one_of("benchmark.implementations", name, known)
    named = [one for one in everyone if names is None or one.name in names]
    missing = {one: reason for one in named if (reason := one.missing(device)) is not None}
    return [one for one in named if one not in missing], missing
