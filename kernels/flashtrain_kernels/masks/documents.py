"""Documents packed into the rows of a batch: where each token's document begins and ends.

B batch, S sequence, T packed tokens, N sequences. Everything is computed on the device and waits for nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import operators, rows


class Documents(NamedTuple):
    """Which document each token of a packed batch belongs to, as the documents' boundaries.

    start, end: (B, S) int32; start[b, i] and end[b, i] are the first index, and one past the last index, of the
    document that token i of row b belongs to. A token with end <= start belongs to none, and sees nothing.
    A NamedTuple of tensors, so torch.compile and activation checkpointing pass it through. Build it once a batch with
    `documents_from_ids` or `documents_from_cu_seqlens`, and give it to every layer.
    """

    start: Tensor
    end: Tensor


def documents_from_ids(ids: Tensor) -> Documents:
    """Document boundaries from document numbers: a document is a run of equal numbers in a row.

    ids: (B, S) of any integer dtype, in any order (numbers may come again later, as another document).
    Returns Documents with (B, S) int32 tensors. Raises TypeError or ValueError for anything that is no such tensor.
    """
    check_ids("ids", ids)
    return Documents(*operators.bounds_of_ids(ids))


def documents_from_cu_seqlens(cu_seqlens: Tensor, total: int) -> Documents:
    """Document boundaries of one packed row of `total` tokens from cumulative lengths, as flash-attn writes them.

    cu_seqlens: (N + 1,) int32 or int64, non-decreasing from 0: document n is [cu_seqlens[n], cu_seqlens[n + 1]).
    Boundaries are clamped to [0, total]. Tokens outside every document belong to none.
    Returns Documents with (1, total) int32 tensors. Raises TypeError or ValueError for arguments of another form.
    """
    check_cu_seqlens("cu_seqlens", cu_seqlens)
    check_length("total", total)
    return Documents(*operators.bounds_of_cu_seqlens(cu_seqlens, total))


def boundaries(name: str, documents: Documents | Tensor) -> Documents:
    """Documents as they are, or from integer ids (B, S). Raises TypeError or ValueError naming the argument."""
    if isinstance(documents, Tensor):
        check_ids(name, documents)
        return documents_from_ids(documents)
    if not isinstance(documents, Documents):
        raise TypeError(f"{name} must be Documents or integer ids (B, S), not {type(documents).__name__}")
    for field, x in zip(("start", "end"), documents, strict=True):
        check_ids(f"{name}.{field}", x)
        if x.dtype != torch.int32:
            raise TypeError(f"{name}.{field} must be int32, not {x.dtype}")
    if documents.start.shape != documents.end.shape or documents.start.device != documents.end.device:
        raise ValueError(
            f"{name}.start and {name}.end must have one shape and device, not {tuple(documents.start.shape)} on "
            f"{documents.start.device} and {tuple(documents.end.shape)} on {documents.end.device}"
        )
    return documents


def ordinals(documents: Documents) -> Tensor:
    """(B, S) int64: the number of each token's document, counted row by row over the whole batch."""
    return rows.ordinals(documents.start)


def check_ids(name: str, ids: Tensor) -> None:
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"{name} must be an integer tensor (B, S), not {kind}")
    if ids.dim() != 2:
        raise ValueError(f"{name} must have the two dimensions (B, S), not the shape {tuple(ids.shape)}")


def check_cu_seqlens(name: str, cu_seqlens: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{name} must be an integer tensor (N + 1,), not {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, not {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"{name} must have the shape (N + 1,), one more than sequences, not {tuple(cu_seqlens.shape)}")


def check_length(name: str, length: int) -> None:
    if isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an integer, not {type(length).__name__}")
    if length < 0:
        raise ValueError(f"{name} must be 0 or more, not {length}")


def check_window(name: str, window: tuple[int, int]) -> None:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"{name} must be two integers (left, right), not {window!r}")
    for side in window:
        if isinstance(side, bool) or not isinstance(side, (int, torch.SymInt)):
            raise TypeError(f"{name} must be two integers (left, right), not {window!r}")
        if side < -1:
            raise ValueError(f"{name} must be 0 or more on each side, or -1 for no bound, not {window!r}")
