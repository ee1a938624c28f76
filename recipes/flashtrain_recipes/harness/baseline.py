"""The interfaces of a benchmark's case, and of a baseline: an implementation measured on it
(flashtrain is one too)."""

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
    """The interface of a case, the input that all baselines are measured on. It is
    hashable; str(case) is printed."""

    def columns(self) -> Row:
        """Return the case's own columns of a result row, such as its shape."""


class Baseline(ABC):
    """An implementation that a benchmark measures. Each benchmark's subclass
    adds how it is called."""

    name: str  # as benchmark.implementations names it
    title: str  # as tables and figures name it
    compiled: bool = False  # whether torch.compile compiles it

    def missing(self, device: torch.device) -> str | None:
        """Return why the baseline cannot run on this device (no GPU, no
        package), or None where it can."""
        return None

    def applies(self, case: Any) -> bool:
        """Return whether the baseline is measured at the case; where not, it is left out and
        no reason is reported."""
        return True

    def refuses(self, case: Any) -> str | None:
        """Return which feature of the case the baseline lacks, as text for notes.txt; None
        where it can be tried."""
        return None

    def columns(self, case: Any) -> Row:
        """Return the columns that begin the baseline's rows at a case; case=None: those of the row
        of a baseline that cannot run on this machine."""
        return {"implementation": self.title, **({} if case is None else case.columns())}

    def within(self) -> AbstractContextManager[object]:
        """Return the context manager under which all of the baseline's calls run; by
        default it does nothing."""
        return nullcontext()


def choose(
    everyone: Sequence[B], names: Sequence[str] | None, device: torch.device
) -> tuple[list[B], dict[B, str]]:
    """Select baselines by name, and return (those that can run on the device, {those
    that cannot: the reason}).

    Args:
        everyone: all baselines of the benchmark.
        names: the values of benchmark.implementations; None selects all baselines.

    Raises:
        UserError: no baseline has one of the names.
    """
    known = list(dict.fromkeys(one.name for one in everyone))
    for name in names or ():
        one_of("benchmark.implementations", name, known)
    named = [one for one in everyone if names is None or one.name in names]
    missing = {one: reason for one in named if (reason := one.missing(device)) is not None}
    return [one for one in named if one not in missing], missing
