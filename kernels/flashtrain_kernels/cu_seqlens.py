"""Checks of cumulative sequence lengths: where the sequences of a packed row begin and end.

N sequences, T packed tokens.
"""

from typing import Any

import torch
from torch import Tensor

from .arguments import check_device, check_length, dtype_name
from .remembered import values_of


def check_cu_seqlens(
    name: str, cu_seqlens: Any, total: int, device: torch.device, longest_name: str, longest: Any
) -> None:
    """cu_seqlens (N + 1,) int32: 0, then where each sequence ends; longest: the longest one's length, or more.

    The values are checked where they can be read without harm: always on the CPU; on a GPU once for each tensor, and
    not while torch.compile traces or a CUDA graph is captured.
    """
    check_length(longest_name, longest)
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{name} must be an int32 tensor (N + 1,), not {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, not {dtype_name(cu_seqlens.dtype)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"{name} must have the shape (N + 1,) for N sequences, not {tuple(cu_seqlens.shape)}")
    check_device(name, cu_seqlens, device)
    values = values_of(cu_seqlens, _summary)
    if values is None:
        return
    first, least, most, last = values
    if first != 0:
        raise ValueError(f"{name} must start at 0, not at {first}")
    if least < 0:
        raise ValueError(f"{name} must not decrease, and does by {-least}")
    if last > total:
        raise ValueError(f"{name} must end at the number of tokens, {total}, or before, not at {last}")
    if most > longest:
        raise ValueError(f"{longest_name} must be at least the longest sequence's {most} tokens, not {longest}")


def _summary(cu_seqlens: Tensor) -> Tensor:
    """The first value, the shortest and the longest sequence, the last value: one read for all of them."""
    lengths = cu_seqlens.diff()
    return torch.stack([cu_seqlens[0], lengths.amin(), lengths.amax(), cu_seqlens[-1]])
