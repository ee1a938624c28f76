"""State of the whole process: the forced implementation, the installed Triton,
autocast and torch.compile."""

import importlib.metadata
import os
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch

Function = TypeVar("Function", bound=Callable)

# Triton reads the variable when a kernel is defined, so a later change would have no effect.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


class Forced(NamedTuple):
    """The arguments of `dispatch.force`."""

    implementation: str
    tile: Any  # a tile_table.Tile or None
    together: bool


forced: Forced | None = None


def forced_implementation() -> str | None:
    """Return the implementation that `dispatch.force` set, or None."""
    return None if forced is None else forced.implementation


@cache
def release() -> tuple[int, int]:
    """Return (major, minor) of the installed Triton; (0, 0) if there is none."""
    try:
        numbers = importlib.metadata.version("triton").split(".")
    except importlib.metadata.PackageNotFoundError:
        return 0, 0
    return int(numbers[0]), int(numbers[1])


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return torch.autocast's dtype on this device type, or None if it is off. (torch
    raises for meta tensors.)"""
    on = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if on else None


def constant(function: Function) -> Function:
    """Decorator: torch.compile calls the function while it traces, and keeps
    the result as a constant.

    It does what torch.compiler.assume_constant_result does, without the long
    import of torch.compile.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
