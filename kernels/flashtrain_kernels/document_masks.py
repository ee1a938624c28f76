"""The masks of documents in a packed row: document, prefix-LM, shared question, global + window, and blockwise ones.

B batch, S sequence. A query's position is its index; a token of no document sees nothing. Every function takes
`documents` as Documents or as integer ids (B, S), makes a Mask with Bm = B on their device, computed without a
synchronisation, and raises TypeError or ValueError naming the argument.
"""

import torch
from torch import Tensor

from . import mask_operators as operators
from .documents import Documents, boundaries, check_ids, check_length
from .mask_kinds import check_window, within
from .mask_operators import document_rows
from .mask_types import Mask


def document(documents: Documents | Tensor, *, causal: bool) -> Mask:
    """A token sees its own document: all of it, or with `causal` what comes before it, and itself."""
    start, end = boundaries("documents", documents)
    rows = document_rows(operators.WINDOW, start, end, right=0 if causal else -1)
    return Mask(rows, None, start.shape[1])


def prefix_lm(prefix: Tensor, *, documents: Documents | Tensor | None = None, seqlen: int | None = None) -> Mask:
    """A token sees the prefix of its document, and what comes before it: bidirectional in the prefix, then causal.

    prefix: (B, S) integers, for each token the length of its document's prefix; or, without documents, (B,) lengths of
    the rows' prefixes, with seqlen = S. Lengths past the document's end mean all of it, negative ones none.
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

    segments: ids (B, S), a new number for each segment (or their boundaries); the first segment of a document is its
    question, each later one an answer. A segment ends where its document ends.
    """
    return _of_segments(operators.SHARED_QUESTION, segments, documents)


def causal_blockwise(segments: Documents | Tensor, *, documents: Documents | Tensor | None = None) -> Mask:
    """Segments that see themselves causally, and a last one that sees its whole document causally (FlashMask, arXiv
    2410.01359).

    segments: ids (B, S), a new number for each segment (or their boundaries). A segment ends where its document ends.
    """
    return _of_segments(operators.BLOCKWISE, segments, documents)


def block_causal(block_size: int, documents: Documents | Tensor) -> Mask:
    """A token sees its own block and the earlier blocks of its document, blocks counted from the document's start."""
    _check_count("block_size", block_size, 1)
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

    global_tokens: how many. window: (left, right), inclusive, -1 for no bound. causal: nothing sees what comes later.
    documents: None: one document, Bm = 1, made on `device`.
    """
    check_length("seqlen", seqlen)
    _check_count("global_tokens", global_tokens, 0)
    check_window("window", window)
    if documents is None:
        start = torch.zeros(1, seqlen, dtype=torch.int32, device=device)
        end = torch.full_like(start, seqlen)
    else:
        start, end = within("documents", documents, seqlen)
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
    if found.start.device != x.device:
        raise ValueError(f"{name} is on {x.device} and documents on {found.start.device}: they must be on one device")
    return found


def _check_count(name: str, count: int, least: int) -> None:
    if isinstance(count, bool) or not isinstance(count, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an integer, not {type(count).__name__}")
    if count < least:
        raise ValueError(f"{name} must be {least} or more, not {count}")
