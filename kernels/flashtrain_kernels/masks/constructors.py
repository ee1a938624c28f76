"""The masks by name: full, causal, sliding window, packed sequences, and those of documents in a packed row.

B batch, S sequence (Sq queries, Sk keys), T packed tokens, N sequences. In a row of documents a query's position is its
index, and a token of no document sees nothing. `documents` may be Documents or integer ids (B, S): the mask then has
Bm = B and lies on their device. Nothing waits for the device. All raise TypeError or ValueError naming the argument.
"""

import torch
from torch import Tensor

from ..checks import check_cu_seqlens, check_device, check_length, check_window
from . import operators
from .documents import Documents, boundaries, check_ids
from .mask import Mask, Sequences
from .operators import document_rows, packed_rows
from .rows import reach, stacked


def full(seqlen_q: int, seqlen_k: int | None = None, *, device: torch.device | str | None = None) -> Mask:
    """Every query sees every key.

    Args:
        seqlen_q: Sq, 0 or more.
        seqlen_k: Sk; None: Sq.
    """
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

    Args:
        window: (left, right), each 0 or more, or -1 for no bound; (w, 0) is the causal sliding window, (w, w) the full
            one.
        documents: Documents or ids (B, S), on whose device the mask is made; None: one document, Bm = 1.

    Raises:
        TypeError, ValueError: the message names the argument.
    """
    if documents is None:
        return _band(seqlen, seqlen, window, device)
    check_window("window", window)
    start, end = boundaries("documents", documents, seqlen)
    return Mask(document_rows(operators.WINDOW, start, end, left=window[0], right=window[1]), None, seqlen)


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

    Args:
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int32 or int64, non-decreasing from 0; sequence n has the queries
            [cu_seqlens_q[n], cu_seqlens_q[n + 1]), and keys alike. Either may have length 0.
        total_q, total_k: T of queries and of keys. Tokens past the last boundary see nothing and are not seen;
            boundaries are clamped to [0, T], so that no content of cu_seqlens makes a kernel read elsewhere.
        causal, window: as flash-attn, aligned bottom-right within each sequence; causal makes the right bound 0.

    Returns:
        A Mask with Bm = 1.

    Raises:
        TypeError, ValueError: the message names the argument.
    """
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q)
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have one length, not {cu_seqlens_q.shape[0]} and "
            f"{cu_seqlens_k.shape[0]}"
        )
    check_device("cu_seqlens_q", cu_seqlens_q, cu_seqlens_k.device, "cu_seqlens_k")
    check_length("total_q", total_q)
    check_length("total_k", total_k)
    check_window("window", window)
    left, right = (window[0], 0) if causal else window
    if cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32:
        return sequences(cu_seqlens_q, cu_seqlens_k, total_q, total_k, (left, right)).mask()
    return Mask(packed_rows(cu_seqlens_q, cu_seqlens_k, total_q, total_k, left, right), None, total_k)


def sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, total_k: int, window: tuple[int, int]
) -> Sequences:
    """The Sequences of arguments that are checked; cu_seqlens are int32."""
    return Sequences(cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), total_q, total_k, (window[0], window[1]))


def document(documents: Documents | Tensor, *, causal: bool) -> Mask:
    """A token sees its own document: all of it, or with `causal` what comes before it, and itself."""
    start, end = boundaries("documents", documents)
    rows = document_rows(operators.WINDOW, start, end, right=0 if causal else -1)
    return Mask(rows, None, start.shape[1])


def prefix_lm(prefix: Tensor, *, documents: Documents | Tensor | None = None, seqlen: int | None = None) -> Mask:
    """A token sees the prefix of its document, and what comes before it: bidirectional in the prefix, then causal.

    Args:
        prefix: (B, S) integers, for each token the length of its document's prefix; or, without documents, (B,) lengths
            of the rows' prefixes, with seqlen = S. Lengths past the document's end mean all of it, negative ones none.
    """
    if isinstance(prefix, Tensor) and prefix.dim() == 1:
        if documents is not None:
            raise ValueError("prefix must have the shape (B, S) with documents (one length a token), not (B,)")
        if seqlen is None:
            raise ValueError("seqlen must be given with a prefix of the shape (B,)")
        check_length("seqlen", seqlen)
        prefix = prefix[:, None].expand(-1, seqlen)
    check_ids("prefix", prefix)
    if seqlen is not None and prefix.shape[1] != seqlen:
        raise ValueError(f"prefix must have seqlen = {seqlen} tokens a row, not {prefix.shape[1]}")
    start, end = _documents_like("prefix", prefix, documents)
    return Mask(document_rows(operators.PREFIX, start, end, prefix=prefix), None, start.shape[1])


def shared_question(segments: Documents | Tensor, *, documents: Documents | Tensor | None = None) -> Mask:
    """Several answers to one question, packed behind it: a token sees its own segment causally, and the question.

    Args:
        segments: ids (B, S), a new number for each segment, or their boundaries. A document's first segment is its
            question, each later one an answer; a segment ends where its document ends.
        documents: Documents or ids (B, S); None: one document a row.
    """
    return _of_segments(operators.SHARED_QUESTION, segments, documents)


def causal_blockwise(segments: Documents | Tensor, *, documents: Documents | Tensor | None = None) -> Mask:
    """Segments that see themselves causally, and a last one that sees its whole document causally (FlashMask, arXiv
    2410.01359).

    Args:
        segments: ids (B, S), a new number for each segment, or their boundaries; it ends where its document ends.
        documents: Documents or ids (B, S); None: one document a row.
    """
    return _of_segments(operators.BLOCKWISE, segments, documents)


def block_causal(block_size: int, documents: Documents | Tensor) -> Mask:
    """A token sees its own block and the earlier blocks of its document, blocks counted from the document's start."""
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
    """A sliding window, and the first tokens of each document, which see everything in it and are seen by all of it.

    Args:
        global_tokens: how many.
        window: (left, right), inclusive, -1 for no bound.
        causal: nothing sees what comes later.
        documents: None: one document, Bm = 1, made on `device`.
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


def _of_segments(kind: str, segments: Documents | Tensor, documents: Documents | Tensor | None) -> Mask:
    first, past = boundaries("segments", segments)
    start, end = _documents_like("segments", first, documents)
    return Mask(document_rows(kind, start, end, first=first, past=past), None, start.shape[1])


def _documents_like(name: str, x: Tensor, documents: Documents | Tensor | None) -> Documents:
    """The boundaries of documents with x's shape (B, S), or of one document a row."""
    if documents is None:
        start = torch.zeros(x.shape, dtype=torch.int32, device=x.device)
        return Documents(start, torch.full_like(start, x.shape[1]))
    found = boundaries("documents", documents)
    if found.start.shape != x.shape:
        raise ValueError(
            f"{name} and documents must have one shape (B, S), not {tuple(x.shape)} and {tuple(found.start.shape)}"
        )
    check_device(name, x, found.start.device, "documents")
    return found


def _band(seqlen_q: int, seqlen_k: int | None, window: tuple[int, int], device: torch.device | str | None) -> Mask:
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    check_length("seqlen_q", seqlen_q)
    check_length("seqlen_k", seqlen_k)
    check_window("window", window)
    position = torch.arange(seqlen_q, device=device, dtype=torch.int32)[None] + (seqlen_k - seqlen_q)
    start = torch.zeros_like(position)
    low, high = reach(position, window, start, torch.full_like(position, seqlen_k))
    return Mask(stacked(low, high, position, start, start), None, seqlen_k, band=(window[0], window[1]))
