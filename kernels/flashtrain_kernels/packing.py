"""Boundaries of sequences packed into one row, as flash-attn's varlen functions take
them, and their checks.

T packed tokens, N sequences.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import plain_integer
from .checks import INTEGERS, check_cu_seqlens, check_device, check_length
from .device_values import values_of


class Packing(NamedTuple):
    """The boundaries (cu_seqlens) and greatest lengths of the N sequences of a packed row."""

    cu_seqlens_q: Tensor  # (N + 1,) int32: 0, then where each sequence's queries end
    cu_seqlens_k: Tensor
    max_seqlen_q: int | Tensor  # the longest sequence's length, or more
    max_seqlen_k: int | Tensor

    @property
    def number(self) -> int:
        """Return N, the number of sequences."""
        return self.cu_seqlens_q.shape[0] - 1


def check_packing(packing: Packing, tensors: Sequence[Tensor], tokens_k: int | None = None) -> None:
    """Raise TypeError or ValueError unless boundaries fit tensors. tokens_k: number of
    keys; None: k's length."""
    sides = ("cu_seqlens",) if len(tensors) == 1 else ("cu_seqlens_q", "cu_seqlens_k")
    for name, cu_seqlens in zip(sides, packing[:2], strict=False):
        check_cu_seqlens(name, cu_seqlens, (torch.int32,))
        check_device(name, cu_seqlens, tensors[0].device)
    check_boundaries(packing, tensors, tokens_k)
    of_q, of_k = packing.number, packing.cu_seqlens_k.shape[0] - 1
    if of_q != of_k:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have equally many sequences, not {of_q} and {of_k}"
        )


def check_boundaries(
    packing: Packing, tensors: Sequence[Tensor], tokens_k: int | None = None
) -> None:
    """Check the values of a packed row's boundaries, whose dtypes and shapes are checked already.

    Values are checked on the CPU, and on a GPU once for each tensor, but not under torch.compile
    or CUDA graph capture.
    """
    cu_q, cu_k, longest_q, longest_k = packing
    tokens_q, tokens_k = tensors[0].shape[0], tensors[-1].shape[0] if tokens_k is None else tokens_k
    if len(tensors) == 1:
        return _check_ends("cu_seqlens", cu_q, tokens_q, "max_seqlen", longest_q)
    _check_ends("cu_seqlens_q", cu_q, tokens_q, "max_seqlen_q", longest_q)
    if cu_k is not cu_q or longest_k is not longest_q or tokens_k != tokens_q:
        _check_ends("cu_seqlens_k", cu_k, tokens_k, "max_seqlen_k", longest_k)


def _check_ends(name: str, cu_seqlens: Tensor, total: int, longest_name: str, longest: Any) -> None:
    values = values_of(cu_seqlens, _lengths)
    if isinstance(longest, Tensor) and longest.numel() == 1 and longest.dtype in INTEGERS:
        read = None if values is None else values_of(longest, lambda x: x)
        longest = 0 if read is None else read[0]
        values = None if read is None else values
    longest = plain_integer(longest)
    check_length(longest_name, longest)
    if values is None:
        return
    first, least, most, last = values
    if first != 0:
        raise ValueError(f"{name} must start at 0, not at {first}")
    if least < 0:
        raise ValueError(f"{name} must not decrease: it falls by {-least}")
    if last > total:
        raise ValueError(
            f"{name} must end at the number of tokens, {total}, or before, not at {last}"
        )
    if most > longest:
        raise ValueError(
            f"{longest_name} must be at least the longest sequence's {most} tokens, not {longest}"
        )


def _lengths(cu_seqlens: Tensor) -> Tensor:
    """Return (4,): the first value, the shortest and the longest sequence, the last value, so that
    one read gets them all."""
    lengths = cu_seqlens.diff()
    return torch.stack([cu_seqlens[0], lengths.amin(), lengths.amax(), cu_seqlens[-1]])
