"""Checks that the public functions share: each raises TypeError or ValueError,
which names the argument."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as messages show it: "float16" for torch.float16."""
    return str(dtype).removeprefix("torch.")


def check_dtype(name: str, x: Any, layout: str, dtypes: Sequence[torch.dtype] = ()) -> None:
    """Raise TypeError unless x is a tensor of one of these dtypes (empty: any).
    layout: its shape in letters."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor {layout}, not {type(x).__name__}")
    if dtypes and x.dtype not in dtypes:
        expected = " or ".join(dict.fromkeys(map(dtype_name, dtypes)))
        raise TypeError(f"{name} must be {expected}, not {dtype_name(x.dtype)}")


def check_device(name: str, x: Tensor, device: torch.device, other_name: str = "q") -> None:
    """Raise ValueError unless x is on this device, that of the tensor called other_name."""
    if x.device != device:
        raise ValueError(
            f"{name} is on {x.device} and {other_name} on {device}: they must be on the same device"
        )


def check_shape(name: str, x: Tensor, shape: Sequence[int], layout: str = "") -> None:
    """Raise ValueError unless x has exactly this shape. layout: the shape in
    letters, for the message."""
    if tuple(x.shape) != tuple(shape):
        equals = f"{layout} = " if layout else ""
        raise ValueError(f"{name} must have the shape {equals}{tuple(shape)}, not {tuple(x.shape)}")


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError unless value is True or False (1 and None are neither)."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")


def check_number(name: str, value: Any, or_none: str = "") -> None:
    """Raise TypeError unless value is an int or a float (no bool). or_none: what else is
    allowed, for the message."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number{or_none}, not {type(value).__name__}")


def check_length(name: str, length: Any, least: int = 0) -> None:
    """Raise TypeError or ValueError unless length (of tokens, blocks, ...) is an
    integer of at least `least`."""
    if isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an integer, not {type(length).__name__}")
    if length < least:
        raise ValueError(f"{name} must be {least} or more, not {length}")


def check_window(name: str, window: Any) -> None:
    """Raise TypeError or ValueError unless window is two integers (left, right), each
    -1 (no bound) or more."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"{name} must be two integers (left, right), not {window!r}")
    for side in window:
        if isinstance(side, bool) or not isinstance(side, (int, torch.SymInt)):
            raise TypeError(f"{name} must be two integers (left, right), not {window!r}")
        if side < -1:
            raise ValueError(
                f"{name} must be 0 or more on each side, or -1 for no bound, not {window!r}"
            )


def check_cu_seqlens(name: str, cu_seqlens: Any, dtypes: Sequence[torch.dtype] = INTEGERS) -> None:
    """Raise TypeError or ValueError unless cu_seqlens is (N + 1,) for N >= 1
    sequences. Values are not read."""
    check_dtype(name, cu_seqlens, "(N + 1,)", dtypes)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"{name} must have the shape (N + 1,) for N sequences, not {tuple(cu_seqlens.shape)}"
        )
