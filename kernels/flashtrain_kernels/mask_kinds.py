"""The masks of plain sequences: full, causal, sliding window, and sequences packed one after the other (varlen).

B batch, S sequence, Sq queries, Sk keys, T packed tokens, N sequences. The masks within documents: document_masks.py.
"""

import torch
from torch import Tensor

from .documents import Documents, boundaries, check_cu_seqlens, check_length
from .mask_operators import WINDOW, document_rows, packed_rows
from .mask_reference import reach, stacked
from .mask_types import Mask


def full(seqlen_q: int, seqlen_k: int | None = None, *, device: torch.device | str | None = None) -> Mask:
    """Every query sees every key. seqlen_k: default seqlen_q. Bm = 1. Raises ValueError for negative lengths."""
    return _band(seqlen_q, seqlen_k, (-1, -1), device)


def causal(seqlen_q: int, seqlen_k: int | None = None, *, device: torch.device | str | None = None) -> Mask:
    """Query i sees the keys up to i + Sk - Sq: aligned bottom-right, so the last query sees every key. Bm = 1."""
    return _band(seqlen_q, seqlen_k, (-1, 0), device)


def sliding_window(
    seqlen: int,
    window: tuple[int, int],
    *,
    documents: Documents | Tensor | None = None,
    device: torch.device | str | None = None,
) -> Mask:
    """Query i sees the keys from i - left to i + right, both included, of its own document.

    window: (left, right), each 0 or more, or -1 for no bound; (w, 0) is the causal sliding window, (w, w) the full one.
    documents: Documents or ids (B, S), on whose device the mask is made; None: one document, Bm = 1.
    Raises TypeError or ValueError naming the argument.
    """
    if documents is None:
        return _band(seqlen, seqlen, window, device)
    check_window("window", window)
    start, end = within("documents", documents, seqlen)
    return Mask(document_rows(WINDOW, start, end, left=window[0], right=window[1]), None, seqlen)


def varlen(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    total_q: int,
    total_k: int,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
) -> Mask:
    """N sequences packed one after the other into one row: the queries of a sequence see the keys of the same sequence.

    cu_seqlens_q, cu_seqlens_k: (N + 1,) int32 or int64, non-decreasing from 0; sequence n has the queries
    [cu_seqlens_q[n], cu_seqlens_q[n + 1]), and keys alike. Either may have length 0.
    total_q, total_k: T of queries and of keys. Tokens past the last boundary see nothing and are not seen; boundaries
    are clamped to [0, T], so that no content of cu_seqlens makes a kernel read elsewhere.
    causal, window: as flash-attn, aligned bottom-right within each sequence; causal makes the right bound 0.
    Returns a Mask with Bm = 1. Raises TypeError or ValueError naming the argument.
    """
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q)
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have one length, not {cu_seqlens_q.shape[0]} and "
            f"{cu_seqlens_k.shape[0]}"
        )
    if cu_seqlens_q.device != cu_seqlens_k.device:
        raise ValueError(
            f"cu_seqlens_q is on {cu_seqlens_q.device} and cu_seqlens_k on {cu_seqlens_k.device}: they must be on the "
            "same device"
        )
    check_length("total_q", total_q)
    check_length("total_k", total_k)
    check_window("window", window)
    left, right = (window[0], 0) if causal else window
    return Mask(packed_rows(cu_seqlens_q, cu_seqlens_k, total_q, total_k, left, right), None, total_k)


def within(name: str, documents: Documents | Tensor, seqlen: int | None = None) -> Documents:
    """The boundaries of documents, checked to have `seqlen` tokens."""
    found = boundaries(name, documents)
    if seqlen is not None:
        check_length("seqlen", seqlen)
        if found.start.shape[1] != seqlen:
            raise ValueError(f"{name} must have seqlen = {seqlen} tokens a row, not {found.start.shape[1]}")
    return found


def check_window(name: str, window: tuple[int, int]) -> None:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"{name} must be two integers (left, right), not {window!r}")
    for side in window:
        if isinstance(side, bool) or not isinstance(side, (int, torch.SymInt)):
            raise TypeError(f"{name} must be two integers (left, right), not {window!r}")
        if side < -1:
            raise ValueError(f"{name} must be 0 or more on each side, or -1 for no bound, not {window!r}")


def _band(seqlen_q: int, seqlen_k: int | None, window: tuple[int, int], device: torch.device | str | None) -> Mask:
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    check_length("seqlen_q", seqlen_q)
    check_length("seqlen_k", seqlen_k)
    check_window("window", window)
    position = torch.arange(seqlen_q, device=device, dtype=torch.int32)[None] + (seqlen_k - seqlen_q)
    start = torch.zeros_like(position)
    low, high = reach(position, window, start, torch.full_like(position, seqlen_k))
    return Mask(stacked(low, high, position, start, start), None, seqlen_k, band=(window[0], window[1]))
