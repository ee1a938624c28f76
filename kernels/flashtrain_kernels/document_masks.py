"""The masks of documents in a packed row: document, prefix-LM, shared question, global + window, and blockwise ones.

B batch, S sequence. A query's position is its index; a token of no document sees nothing. Every function takes
`documents` as Documents or as integer ids (B, S), makes a Mask with Bm = B on their device, computed without a
synchronisation, and raises TypeError or ValueError naming the argument.
"""

import torch
from torch import Tensor

from .documents import Documents, boundaries, check_ids, check_length, ordinals
from .mask_kinds import WIDEST, build, check_window, position_of, reach, within
from .mask_types import Mask


def document(documents: Documents | Tensor, *, causal: bool) -> Mask:
    """A token sees its own document: all of it, or with `causal` what comes before it, and itself."""
    start, end = boundaries("documents", documents)
    position = position_of(start)
    low, high = reach(position, (-1, 0 if causal else -1), start, end)
    return build(low, high, position, start, ordinals(Documents(start, end)), start.shape[1])


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
    position = position_of(start)
    length = prefix.clamp(0, prefix.shape[1]).to(torch.int32)
    high = torch.minimum(end, torch.maximum(start + length, position + 1))
    return build(start, high, position, start, ordinals(Documents(start, end)), start.shape[1])


def shared_question(segments: Documents | Tensor, *, documents: Documents | Tensor | None = None) -> Mask:
    """Several answers to one question, packed behind it: a token sees its own segment causally, and the question.

    segments: ids (B, S), a new number for each segment (or their boundaries); the first segment of a document is its
    question, each later one an answer. A segment ends where its document ends.
    """
    (first, past), (start, end) = _segments(segments, documents)
    position = position_of(start)
    question_end = _at(past, start)
    # The first answer follows the question directly: one interval.
    joined = first <= question_end
    low = torch.where(joined, start, first)
    high = torch.minimum(position + 1, past)
    high2 = torch.where(joined, start, torch.minimum(question_end, end))
    sequence = ordinals(Documents(start, end))
    return build(low, high, position, start, sequence, start.shape[1], start, high2)


def causal_blockwise(segments: Documents | Tensor, *, documents: Documents | Tensor | None = None) -> Mask:
    """Segments that see themselves causally, and a last one that sees its whole document causally (FlashMask, arXiv
    2410.01359).

    segments: ids (B, S), a new number for each segment (or their boundaries). A segment ends where its document ends.
    """
    (first, past), (start, end) = _segments(segments, documents)
    position = position_of(start)
    low = torch.where(past == end, start, first)
    high = torch.minimum(position + 1, past)
    return build(low, high, position, start, ordinals(Documents(start, end)), start.shape[1])


def block_causal(block_size: int, documents: Documents | Tensor) -> Mask:
    """A token sees its own block and the earlier blocks of its document, blocks counted from the document's start."""
    _check_count("block_size", block_size, 1)
    start, end = boundaries("documents", documents)
    position = position_of(start)
    block_size = min(block_size, WIDEST)
    block = torch.div(position - start, block_size, rounding_mode="floor") + 1
    # Not past the row's end, whatever the block size, so that 32 bits hold it.
    high = torch.minimum(end.to(torch.int64), start + block.to(torch.int64) * block_size)
    return build(start, high, position, start, ordinals(Documents(start, end)), start.shape[1])


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
    position = position_of(start)
    left, right = window
    last = torch.minimum(end, position + 1) if causal else end
    low, high = reach(position, (left, 0 if causal else right), start, end)
    global_end = torch.minimum(last, start + min(global_tokens, seqlen))
    everything = position < global_end
    joined = everything | (low <= global_end)  # one interval
    low = torch.where(joined, start, low)
    high = torch.where(everything, last, high)
    high2 = torch.where(joined, start, global_end)
    sequence = ordinals(Documents(start, end))
    return build(low, high, position, start, sequence, seqlen, start, high2)


def _segments(segments: Documents | Tensor, documents: Documents | Tensor | None) -> tuple[Documents, Documents]:
    """The boundaries of segments, cut at the documents' boundaries, and those of the documents."""
    first, past = boundaries("segments", segments)
    start, end = _documents_like("segments", first, documents)
    return Documents(torch.maximum(first, start), torch.minimum(past, end)), Documents(start, end)


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


def _at(x: Tensor, index: Tensor) -> Tensor:
    """x[b, index[b, i]], with the index clamped into the row."""
    return x.gather(1, index.clamp(0, max(x.shape[1] - 1, 0)).to(torch.int64))


def _check_count(name: str, count: int, least: int) -> None:
    if isinstance(count, bool) or not isinstance(count, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an integer, not {type(count).__name__}")
    if count < least:
        raise ValueError(f"{name} must be {least} or more, not {count}")
