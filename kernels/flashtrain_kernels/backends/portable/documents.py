"""The kernels that find where each token's document begins and ends: from document numbers, or from cu_seqlens.

B batch, S sequence, T packed tokens, N sequences. A program fills a chunk of TOKENS tokens of a row. From numbers it is
two launches: the first notes each chunk's first and last place where a document begins, so that the second has no
further to look than its own tokens and those notes.
"""

import torch
import triton
import triton.language as tl

from .launch import Launch, ceil_div

INT_MAX = tl.constexpr(2**31 - 1)
TOKENS = 1024  # tokens a program
NOTES = 1024  # chunks whose notes a program reads at once
NOT_SPECIALISED = ["seqlen", "chunks", "sequences", "total", "steps"]


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def place(chunks, seqlen, TOKENS: tl.constexpr):
    """The program's chunk of its row, the row's first token in the batch, and its tokens: indices and which exist."""
    program = tl.program_id(0)
    chunk = program % chunks
    index = chunk * TOKENS + tl.arange(0, TOKENS)
    return chunk, (program // chunks).to(tl.int64) * seqlen, index, index < seqlen


@triton.jit
def _begins(ids, row, index, valid):
    """Does a document begin at each token? Past the row's end none does."""
    own = tl.load(ids + row + index, mask=valid, other=0)
    before = tl.load(ids + row + index - 1, mask=valid & (index > 0), other=0)
    return valid & ((index == 0) | (own != before))


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def notes_kernel(ids, first, last, chunks, seqlen, TOKENS: tl.constexpr):
    """The first and the last token of each chunk where a document begins; INT_MAX and -1 where none does."""
    _, row, index, valid = place(chunks, seqlen, TOKENS)
    begins = _begins(ids, row, index, valid)
    tl.store(first + tl.program_id(0), tl.min(tl.where(begins, index, INT_MAX), 0))
    tl.store(last + tl.program_id(0), tl.max(tl.where(begins, index, -1), 0))


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def bounds_of_ids_kernel(ids, first, last, start, end, chunks, seqlen, TOKENS: tl.constexpr, NOTES: tl.constexpr):
    """start and end (B, S) of each token's document."""
    chunk, row, index, valid = place(chunks, seqlen, TOKENS)
    notes = tl.program_id(0) - chunk  # of the row
    begun = chunk * 0 - 1
    ended = chunk * 0 + seqlen
    for at in range(0, chunks, NOTES):
        other = at + tl.arange(0, NOTES)
        begun = tl.maximum(begun, tl.max(tl.load(last + notes + other, mask=other < chunk, other=-1), 0))
        later = (other > chunk) & (other < chunks)
        ended = tl.minimum(ended, tl.min(tl.load(first + notes + other, mask=later, other=INT_MAX), 0))
    here = tl.where(_begins(ids, row, index, valid), index, -1)
    begin = tl.maximum(tl.associative_scan(here, 0, _larger), begun)
    following = tl.where(_begins(ids, row, index + 1, index + 1 < seqlen), index + 1, INT_MAX)
    past = tl.minimum(tl.associative_scan(following, 0, _smaller, reverse=True), ended)
    tl.store(start + row + index, begin, mask=valid)
    tl.store(end + row + index, past, mask=valid)


@triton.jit
def sequence_of(bounds, index, sequences, total, steps):
    """The number of the last sequence that begins at or before each token (of those that begin there, all but the last
    are empty): a search by halves in N + 1 boundaries, clamped to [0, T], so that nothing points outside.
    """
    low = index * 0
    high = low + sequences + 1
    for _ in range(steps):
        middle = (low + high) // 2
        bound = tl.load(bounds + middle, mask=low < high, other=0)
        right = (low < high) & (tl.minimum(tl.maximum(bound, 0), total) <= index)
        high = tl.where(right, high, middle)
        low = tl.where(right, middle + 1, low)
    return tl.minimum(tl.maximum(low - 1, 0), sequences - 1)


@triton.jit
def bounds_of(bounds, number, total):
    """The boundaries of sequences, clamped to [0, total]."""
    begin = tl.minimum(tl.maximum(tl.load(bounds + number), 0), total).to(tl.int32)
    return begin, tl.minimum(tl.maximum(tl.load(bounds + number + 1), 0), total).to(tl.int32)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def bounds_of_cu_seqlens_kernel(bounds, start, end, sequences, total, steps, TOKENS: tl.constexpr):
    """start and end (T,) of each token's sequence; both 0 for a token in none."""
    index = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    begin, past = bounds_of(bounds, sequence_of(bounds, index, sequences, total, steps), total)
    inside = (index >= begin) & (index < past)
    tl.store(start + index, tl.where(inside, begin, 0), mask=index < total)
    tl.store(end + index, tl.where(inside, past, 0), mask=index < total)


def search_steps(sequences: int) -> int:
    """How many halvings leave none of N + 1 boundaries."""
    return (sequences + 1).bit_length()


def bounds_of_ids_launches(ids: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> tuple[Launch, Launch]:
    """The two launches, in this order, that fill start and end (B, S) int32. ids: (B, S), contiguous."""
    chunks = ceil_div(ids.shape[1], TOKENS)
    # Two allocations: the second half of one may not be aligned to 16 bytes, for which Triton would compile anew.
    first, last = (start.new_empty(ids.shape[0] * chunks) for _ in range(2))
    grid, options = (ids.shape[0] * chunks,), {"num_warps": 4}
    notes = Launch(notes_kernel, grid, (ids, first, last, chunks, ids.shape[1]), {"TOKENS": TOKENS}, options)
    constants = {"TOKENS": TOKENS, "NOTES": NOTES}
    args = (ids, first, last, start, end, chunks, ids.shape[1])
    return notes, Launch(bounds_of_ids_kernel, grid, args, constants, options)


def bounds_of_cu_seqlens_launch(cu_seqlens: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> Launch:
    """The launch that fills start and end (1, T) int32. cu_seqlens: (N + 1,), contiguous."""
    total, sequences = start.shape[1], cu_seqlens.shape[0] - 1
    args = (cu_seqlens, start, end, sequences, total, search_steps(sequences))
    return Launch(bounds_of_cu_seqlens_kernel, (ceil_div(total, TOKENS),), args, {"TOKENS": TOKENS}, {"num_warps": 4})
