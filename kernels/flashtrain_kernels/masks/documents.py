"""Documents in packed rows, described by where each token's document begins and ends.

B batch, S sequence, N sequences.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import (
    check_cu_seqlens,
    check_device,
    check_dtype,
    check_length,
    check_shape,
    dtype_name,
)
from .operators import bounds_of_cu_seqlens, bounds_of_ids


class Documents(NamedTuple):
    """Boundaries of the document that each token of a packed batch belongs to.

    A NamedTuple of tensors, so torch.compile and activation checkpointing accept it. Make it once a
    batch with `documents_from_ids` or `documents_from_cu_seqlens`, for all layers.

    Attributes:
        start: (B, S) int32, the first index of the token's document.
        end: (B, S) int32, one past its last index. A token with end <= start is in no
            document and sees nothing.
    """

    start: Tensor
    end: Tensor


def documents_from_ids(ids: Tensor) -> Documents:
    """Make Documents from document numbers: a document is a run of equal numbers in a row.

    Args:
        ids: (B, S) of any integer dtype, in any order; a number that comes again
            later is another document.

    Raises:
        TypeError, ValueError: ids is not such a tensor.
    """
    check_ids("ids", ids)
    return Documents(*bounds_of_ids(ids))


def documents_from_cu_seqlens(cu_seqlens: Tensor, total: int) -> Documents:
    """Make Documents (1, total) of one packed row from cumulative lengths, as
    flash-attn writes them.

    Args:
        cu_seqlens: (N + 1,) int32 or int64, non-decreasing from 0: document n is
            [cu_seqlens[n], cu_seqlens[n + 1]). Boundaries are clamped to [0, total]; tokens
            outside are in no document.
        total: number of tokens in the row.

    Raises:
        TypeError, ValueError: the message names the argument.
    """
    check_cu_seqlens("cu_seqlens", cu_seqlens)
    check_length("total", total)
    return Documents(*bounds_of_cu_seqlens(cu_seqlens, total))


def boundaries(name: str, documents: Documents | Tensor, seqlen: int | None = None) -> Documents:
    """Return `documents` as Documents, made from ids (B, S) if they are ids. Raises
    TypeError or ValueError naming the argument `name`, also if rows are not seqlen tokens
    long (None: any length)."""
    if isinstance(documents, Tensor):
        check_ids(name, documents)
        documents = documents_from_ids(documents)
    elif isinstance(documents, Documents):
        for field, x in zip(("start", "end"), documents, strict=True):
            check_dtype(f"{name}.{field}", x, "(B, S)", (torch.int32,))
        check_ids(f"{name}.start", documents.start)
        check_shape(f"{name}.end", documents.end, documents.start.shape)
        check_device(f"{name}.end", documents.end, documents.start.device, f"{name}.start")
    else:
        raise TypeError(
            f"{name} must be Documents or integer ids (B, S), not {type(documents).__name__}"
        )
    if seqlen is not None:
        check_length("seqlen", seqlen)
        if documents.start.shape[1] != seqlen:
            raise ValueError(
                f"{name} must have seqlen = {seqlen} tokens a row, not {documents.start.shape[1]}"
            )
    return documents


def check_ids(name: str, ids: Tensor) -> None:
    """Raise TypeError or ValueError unless ids is an integer tensor (B, S). name: the
    argument's, for the message."""
    check_dtype(name, ids, "(B, S)")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{name} must be an integer tensor (B, S), not {dtype_name(ids.dtype)}")
    if ids.dim() != 2:
        raise ValueError(
            f"{name} must have the two dimensions (B, S), not the shape {tuple(ids.shape)}"
        )
