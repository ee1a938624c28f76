"""What holds for the whole process: what is forced, which Triton is installed, what autocast and torch.compile do."""

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
    """What `dispatch.force` asks for: an implementation, and of the portable kernels a tile."""

    implementation: str
    tile: Any  # a tile_table.Tile or None
    together: bool


forced: Forced | None = None


def forced_implementation() -> str | None:
    """The implementation that `dispatch.force` asks for, if any."""
    return None if forced is None else forced.implementation


@cache
def release() -> tuple[int, int]:
    """Major and minor number of the installed Triton; (0, 0) where there is none."""
    try:
        numbers = importlib.metadata.version("triton").split(".")
    except importlib.metadata.PackageNotFoundError:
        return 0, 0
    return int(numbers[0]), int(numbers[1])


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """torch.autocast's dtype on this type of device, None where it is off. torch has none for meta tensors, and raises
    where it is asked."""
    on = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if on else None


def constant(function: Function) -> Function:
    """torch.compiler.assume_constant_result: torch.compile calls the function while it traces, and keeps the result.

    Without importing torch.compile: that is as long as importing torch itself.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
