"""The masks of plain sequences: full, causal, sliding window, and sequences packed one after the other (varlen).

B batch, S sequence, Sq queries, Sk keys, T packed tokens, N sequences. The masks within documents: document_masks.py.
"""

import torch
from torch import Tensor

from .documents import Documents, boundaries, check_cu_seqlens, check_length, locate, ordinals
from .mask_types import Mask

# A window this wide is no bound: positions are smaller, and their sum with it still fits 32 bits.
WIDEST = 2**30


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
    start, end = within("documents", documents, seqlen)
    low, high = reach(position_of(start), window, start, end)
    return build(low, high, position_of(start), start, ordinals(Documents(start, end)), start.shape[1])


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
    begin, past, number = locate(cu_seqlens_q, total_q)
    bounds = cu_seqlens_k.to(torch.int64).clamp(0, total_k).to(torch.int32)
    start, end = bounds[number], bounds[number + 1]
    index = torch.arange(total_q, device=start.device, dtype=torch.int32)
    position = end - past + index
    low, high = reach(position, (window[0], 0) if causal else window, start, end)
    inside = past > begin
    zero = torch.zeros_like(start)
    rows = (torch.where(inside, row, zero)[None] for row in (low, high, position, start))
    low, high, position, start = rows
    return build(low, high, position, start, number[None], total_k)


def build(
    low: Tensor,
    high: Tensor,
    position: Tensor,
    start: Tensor,
    sequence: Tensor,
    seqlen_k: int,
    low2: Tensor | None = None,
    high2: Tensor | None = None,
) -> Mask:
    """A Mask from its rows, each (Bm, Sq) or broadcasting to it."""
    rows = [low, high, position, start, sequence]
    if low2 is not None and high2 is not None:
        rows += [low2, high2]
    return Mask(torch.stack(torch.broadcast_tensors(*[row.to(torch.int32) for row in rows])), None, seqlen_k)


def reach(position: Tensor, window: tuple[int, int], start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """LOW and HIGH of queries at `position`, whose sequences are [start, end), under an inclusive window."""
    left, right = window
    low = start if left < 0 else torch.maximum(start, position - min(left, WIDEST))
    high = end if right < 0 else torch.minimum(end, position + (min(right, WIDEST) + 1))
    return low, high


def position_of(like: Tensor) -> Tensor:
    """(1, S) int32: 0, 1, 2, ... for the tokens of a (B, S) tensor, on its device."""
    return torch.arange(like.shape[1], device=like.device, dtype=torch.int32)[None]


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
    return build(low, high, position, start, start, seqlen_k)
