"""Constructors of masks: full, causal, sliding window, packed sequences, and the masks of
documents in a packed row.

B batch, S sequence (Sq queries, Sk keys), T packed tokens, N sequences; Bm is B, or 1 for a mask
that all rows share. In a row of documents a query's position is its index, and a token of no
document sees nothing. A mask lies on the device of its documents, and is made without waiting. All
raise TypeError or ValueError naming the argument.
"""

import torch
from torch import Tensor

from ..checks import check_cu_seqlens, check_device, check_length, check_window
from . import operators
from .documents import Documents, boundaries, check_ids
from .mask import Mask, Sequences
from .operators import document_rows, packed_rows
from .rows import reach, stacked


def full(
    seqlen_q: int, seqlen_k: int | None = None, *, device: torch.device | str | None = None
) -> Mask:
    """Make the mask under which every query sees every key.

    Args:
        seqlen_q: number of queries Sq, 0 or more.
        seqlen_k: number of keys Sk; None: Sq.
    """
    return _band(seqlen_q, seqlen_k, (-1, -1), device)


def causal(
    seqlen_q: int, seqlen_k: int | None = None, *, device: torch.device | str | None = None
) -> Mask:
    """Make the causal mask, aligned bottom-right: query i sees the keys up to i + Sk - Sq,
    the last query every key."""
    return _band(seqlen_q, seqlen_k, (-1, 0), device)


def sliding_window(
    seqlen: int,
    window: tuple[int, int],
    *,
    documents: Documents | Tensor | None = None,
    device: torch.device | str | None = None,
) -> Mask:
    """Make the mask under which query i sees the keys i - left to i + right, both
    included, of its own document.

    Args:
        seqlen: tokens in a row, S.
        window: (left, right), each 0 or more, or -1 for no bound; (w, 0) is a causal sliding
            window, (w, w) a full one.
        documents: Documents or ids (B, S), on whose device the mask is made; None: one
            document, the mask on `device`.

    Raises:
        TypeError, ValueError: the message names the argument.
    """
    if documents is None:
        return _band(seqlen, seqlen, window, device)
    check_window("window", window)
    start, end = boundaries("documents", documents, seqlen)
    return Mask(
        document_rows(operators.WINDOW, start, end, left=window[0], right=window[1]), None, seqlen
    )


def varlen(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    total_q: int,
    total_k: int,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
) -> Mask:
    """Make the mask of N sequences packed into one row: a query sees keys of its own sequence only.

    Args:
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int32 or int64, non-decreasing from 0; sequence
            n has the queries cu_seqlens_q[n] to cu_seqlens_q[n + 1] - 1, and its keys
            likewise; it may have none.
        total_q, total_k: numbers of queries and keys in the row. Tokens past the last boundary
            see nothing and are not seen; boundaries are clamped to the totals, so no value makes
            a kernel read outside.
        causal, window: as flash_attn_func's causal and window_size, aligned
            bottom-right within each sequence.

    Returns:
        A Mask of one row, Bm = 1.

    Raises:
        TypeError, ValueError: the message names the argument.
    """
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q)
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must have the same length, "
            f"not {cu_seqlens_q.shape[0]} and {cu_seqlens_k.shape[0]}"
        )
    check_device("cu_seqlens_q", cu_seqlens_q, cu_seqlens_k.device, "cu_seqlens_k")
    check_length("total_q", total_q)
    check_length("total_k", total_k)
    check_window("window", window)
    left, right = (window[0], 0) if causal else window
    if cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32:
        return sequences(cu_seqlens_q, cu_seqlens_k, total_q, total_k, (left, right)).mask()
    return Mask(
        packed_rows(cu_seqlens_q, cu_seqlens_k, total_q, total_k, left, right), None, total_k
    )


def sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, total_k: int, window: tuple[int, int]
) -> Sequences:
    """Make Sequences from checked arguments: cu_seqlens (N + 1,) int32, window (left, right)."""
    return Sequences(
        cu_seqlens_q.contiguous(),
        cu_seqlens_k.contiguous(),
        total_q,
        total_k,
        (window[0], window[1]),
    )


def document(documents: Documents | Tensor, *, causal: bool) -> Mask:
    """Make the mask under which a token sees its own document: all of it, or with `causal`
    the tokens up to itself."""
    start, end = boundaries("documents", documents)
    rows = document_rows(operators.WINDOW, start, end, right=0 if causal else -1)
    return Mask(rows, None, start.shape[1])


def prefix_lm(
    prefix: Tensor, *, documents: Documents | Tensor | None = None, seqlen: int | None = None
) -> Mask:
    """Make the prefix-LM mask: a token sees its document's prefix, and the
    document's tokens up to itself.

    Args:
        prefix: (B, S) integers, the prefix length of each token's document; or, without
            documents, (B,), of each row, with seqlen = S. A length past the document's end means
            all of it, a negative one none.
        documents: Documents or ids (B, S); None: each row is one document.
    """
    if isinstance(prefix, Tensor) and prefix.dim() == 1:
        if documents is not None:
            raise ValueError(
                "prefix must have the shape (B, S) with documents, each token's prefix length of "
                "its document, not (B,)"
            )
        if seqlen is None:
            raise ValueError("seqlen must be given with a prefix of the shape (B,)")
        check_length("seqlen", seqlen)
        prefix = prefix[:, None].expand(-1, seqlen)
    check_ids("prefix", prefix)
    if seqlen is not None and prefix.shape[1] != seqlen:
        raise ValueError(f"prefix must have seqlen = {seqlen} tokens a row, not {prefix.shape[1]}")
    start, end = _documents_like("prefix", prefix, documents)
    return Mask(document_rows(operators.PREFIX, start, end, prefix=prefix), None, start.shape[1])


def shared_question(
    segments: Documents | Tensor, *, documents: Documents | Tensor | None = None
) -> Mask:
    """Make the mask of answers packed after one question: a token sees the question, and
    its own segment causally.

    Args:
        segments: ids (B, S), a new number for each segment, or Documents. A document's
            first segment is its question, each later one an answer; a segment ends
            where its document ends.
        documents: Documents or ids (B, S); None: each row is one document.
    """
    return _of_segments(operators.SHARED_QUESTION, segments, documents)


def causal_blockwise(
    segments: Documents | Tensor, *, documents: Documents | Tensor | None = None
) -> Mask:
    """Make the causal blockwise mask (FlashMask, arXiv 2410.01359): a segment sees itself causally,
    but the last segment of a document the whole document causally.

    Args:
        segments: ids (B, S), a new number for each segment, or Documents; a segment ends
            where its document ends.
        documents: Documents or ids (B, S); None: each row is one document.
    """
    return _of_segments(operators.BLOCKWISE, segments, documents)


def block_causal(block_size: int, documents: Documents | Tensor) -> Mask:
    """Make the mask under which a token sees its own block of `block_size` tokens and its
    document's earlier blocks."""
    check_length("block_size", block_size, 1)
    start, end = boundaries("documents", documents)
    return Mask(document_rows(operators.BLOCKS, start, end, count=block_size), None, start.shape[1])


def global_window(
    seqlen: int,
    global_tokens: int,
    window: tuple[int, int],
    *,
    causal: bool = False,
    documents: Documents | Tensor | None = None,
    device: torch.device | str | None = None,
) -> Mask:
    """Make a sliding-window mask with global tokens: the first of each document, which see and
    are seen by all of it.

    Args:
        seqlen: tokens in a row, S.
        global_tokens: how many tokens at each document's start are global.
        window: (left, right), inclusive, -1 for no bound.
        causal: hide later tokens, from global tokens too.
        documents: Documents or ids (B, S); None: one document, the mask on `device`.
    """
    check_length("seqlen", seqlen)
    check_length("global_tokens", global_tokens)
    check_window("window", window)
    if documents is None:
        start = torch.zeros(1, seqlen, dtype=torch.int32, device=device)
        end = torch.full_like(start, seqlen)
    else:
        start, end = boundaries("documents", documents, seqlen)
    kind = operators.CAUSAL_GLOBAL if causal else operators.GLOBAL
    rows = document_rows(kind, start, end, left=window[0], right=window[1], count=global_tokens)
    return Mask(rows, None, seqlen)


def attention_tile(
    frames: int, tokens_per_frame: int, references: int, *, device: torch.device | str | None = None
) -> Mask:
    """Make the mask of attention tile (Efficient-vDiT, arXiv 2502.06155): a token of a video sees
    its own frame and the reference frames, the first ones, whose tokens see all.

    Args:
        frames, tokens_per_frame: S is their product; a frame's tokens are consecutive.
        references: number of reference frames. Frames may stand in any order, as attention does
            not depend on that of tokens which carry their positions.
    """
    check_length("frames", frames)
    check_length("tokens_per_frame", tokens_per_frame, 1)
    check_length("references", references)
    seqlen = frames * tokens_per_frame
    position = torch.arange(seqlen, dtype=torch.int32, device=device)[None]
    past = min(references, frames) * tokens_per_frame
    start, zero = position - position % tokens_per_frame, torch.zeros_like(position)
    low = torch.where(position < past, zero, start)
    high = torch.where(position < past, seqlen, start + tokens_per_frame)
    return Mask(stacked(low, high, position, zero, zero, zero, zero + past), None, seqlen)


def _of_segments(
    kind: str, segments: Documents | Tensor, documents: Documents | Tensor | None
) -> Mask:
    first, past = boundaries("segments", segments)
    start, end = _documents_like("segments", first, documents)
    return Mask(document_rows(kind, start, end, first=first, past=past), None, start.shape[1])


def _documents_like(name: str, x: Tensor, documents: Documents | Tensor | None) -> Documents:
    """Return `documents` as Documents, checked to have the shape (B, S) of x; without them, one
    document a row. name: what messages call x."""
    if documents is None:
        start = torch.zeros(x.shape, dtype=torch.int32, device=x.device)
        return Documents(start, torch.full_like(start, x.shape[1]))
    found = boundaries("documents", documents)
    if found.start.shape != x.shape:
        raise ValueError(
            f"{name} and documents must have the same shape (B, S), "
            f"not {tuple(x.shape)} and {tuple(found.start.shape)}"
        )
    check_device(name, x, found.start.device, "documents")
    return found


def _band(
    seqlen_q: int, seqlen_k: int | None, window: tuple[int, int], device: torch.device | str | None
) -> Mask:
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    check_length("seqlen_q", seqlen_q)
    check_length("seqlen_k", seqlen_k)
    check_window("window", window)
    position = torch.arange(seqlen_q, device=device, dtype=torch.int32)[None] + (
        seqlen_k - seqlen_q
    )
    start = torch.zeros_like(position)
    low, high = reach(position, window, start, torch.full_like(position, seqlen_k))
    return Mask(
        stacked(low, high, position, start, start), None, seqlen_k, band=(window[0], window[1])
    )
