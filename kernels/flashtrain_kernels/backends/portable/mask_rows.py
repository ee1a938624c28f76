"""Kernels that fill Mask.queries, and where each token's document begins and ends:
masks/rows.py on a GPU.

B batch, S sequence, T packed tokens, N sequences. A row is divided into chunks of TOKENS
tokens, one for each program.
"""

import torch
import triton
import triton.language as tl

from ...masks.rows import WIDEST
from .launch import Launch, ceil_div

INT_MAX = tl.constexpr(2**31 - 1)
TOKENS = 1024  # tokens a program
NOTES = 1024  # chunks whose notes a program reads at once
NOT_SPECIALISED = [
    "batch", "seqlen", "chunks", "left", "right", "count", "sequences", "total", "total_q",
    "total_k", "steps"
]  # fmt: skip


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def place(chunks, seqlen, TOKENS: tl.constexpr):
    """Return (number of the program's chunk in its row, elements of all earlier rows, index in
    the row of each of the chunk's TOKENS tokens, whether that index is below seqlen). chunks: how
    many chunks a row has."""
    program = tl.program_id(0)
    chunk = program % chunks
    index = chunk * TOKENS + tl.arange(0, TOKENS)
    return chunk, (program // chunks).to(tl.int64) * seqlen, index, index < seqlen


@triton.jit
def _begins(ids, row, index, valid):
    """Return whether a document begins at each token; False past the end of the row."""
    own = tl.load(ids + row + index, mask=valid, other=0)
    before = tl.load(ids + row + index - 1, mask=valid & (index > 0), other=0)
    return valid & ((index == 0) | (own != before))


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def notes_kernel(ids, first, last, chunks, seqlen, TOKENS: tl.constexpr):
    """Kernel: one program stores the first and last token of its chunk that begin a
    document (none: INT_MAX, -1)."""
    _, row, index, valid = place(chunks, seqlen, TOKENS)
    begins = _begins(ids, row, index, valid)
    tl.store(first + tl.program_id(0), tl.min(tl.where(begins, index, INT_MAX), 0))
    tl.store(last + tl.program_id(0), tl.max(tl.where(begins, index, -1), 0))


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def bounds_of_ids_kernel(
    ids, first, last, start, end, chunks, seqlen, TOKENS: tl.constexpr, NOTES: tl.constexpr
):
    """Kernel: one program fills start and end (B, S), where each token's document begins
    and ends, for a chunk of tokens. first, last: the results of notes_kernel for all
    chunks, read NOTES at a time."""
    chunk, row, index, valid = place(chunks, seqlen, TOKENS)
    notes = tl.program_id(0) - chunk  # of the row
    begun = chunk * 0 - 1
    ended = chunk * 0 + seqlen
    for at in range(0, chunks, NOTES):
        other = at + tl.arange(0, NOTES)
        begun = tl.maximum(
            begun, tl.max(tl.load(last + notes + other, mask=other < chunk, other=-1), 0)
        )
        later = (other > chunk) & (other < chunks)
        ended = tl.minimum(
            ended, tl.min(tl.load(first + notes + other, mask=later, other=INT_MAX), 0)
        )
    here = tl.where(_begins(ids, row, index, valid), index, -1)
    begin = tl.maximum(tl.associative_scan(here, 0, _larger), begun)
    following = tl.where(_begins(ids, row, index + 1, index + 1 < seqlen), index + 1, INT_MAX)
    past = tl.minimum(tl.associative_scan(following, 0, _smaller, reverse=True), ended)
    tl.store(start + row + index, begin, mask=valid)
    tl.store(end + row + index, past, mask=valid)


@triton.jit
def sequence_of(bounds, index, sequences, total, steps):
    """Return the number of the last sequence that begins at or before each token `index`, by a
    binary search of `steps` halvings in the N + 1 boundaries, clamped to [0, total]. (Earlier
    sequences that begin there are empty.)"""
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
    """Return (begin, end) of the sequences `number`, clamped to [0, total]. bounds: pointer
    to (N + 1,) boundaries."""
    begin = tl.minimum(tl.maximum(tl.load(bounds + number), 0), total).to(tl.int32)
    return begin, tl.minimum(tl.maximum(tl.load(bounds + number + 1), 0), total).to(tl.int32)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def bounds_of_cu_seqlens_kernel(bounds, start, end, sequences, total, steps, TOKENS: tl.constexpr):
    """Kernel: one program fills start and end (T,), where each token's sequence begins and ends,
    for TOKENS tokens; 0 for tokens in no sequence. bounds: cu_seqlens (N + 1,); sequences: N;
    total: T; steps: from search_steps."""
    index = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    begin, past = bounds_of(bounds, sequence_of(bounds, index, sequences, total, steps), total)
    inside = (index >= begin) & (index < past)
    tl.store(start + index, tl.where(inside, begin, 0), mask=index < total)
    tl.store(end + index, tl.where(inside, past, 0), mask=index < total)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def count_kernel(start, counts, chunks, seqlen, TOKENS: tl.constexpr):
    """Kernel: one program counts the documents that begin in its chunk. start: (B, S),
    see bounds_of_ids_kernel."""
    _, row, index, valid = place(chunks, seqlen, TOKENS)
    begins = valid & (tl.load(start + row + index, mask=valid, other=-1) == index)
    tl.store(counts + tl.program_id(0), tl.sum(begins.to(tl.int32), 0))


@triton.jit
def _ordinal(start, counts, index, valid, NOTES: tl.constexpr):
    """The number of each token's document, counted over the whole batch."""
    before = tl.program_id(0) * 0
    for at in range(0, tl.program_id(0), NOTES):
        other = at + tl.arange(0, NOTES)
        before += tl.sum(tl.load(counts + other, mask=other < tl.program_id(0), other=0), 0)
    begins = valid & (start == index)
    return tl.maximum(before + tl.cumsum(begins.to(tl.int32), 0) - 1, 0)


@triton.jit
def _reach(position, left, right, start, end):
    """Return (LOW, HIGH) of Mask.queries for an inclusive window within [start, end). left, right:
    tokens before and after the query, WIDEST for no bound."""
    return tl.maximum(start, position - left), tl.minimum(end, position + right + 1)


@triton.jit
def _segment_rows(
    position,
    start,
    end,
    first_ptr,
    past_ptr,
    end_ptr,
    row,
    index,
    valid,
    seqlen,
    SHARED: tl.constexpr,
):
    """Return (LOW, HIGH, HIGH2) for tokens that see their own segment causally. SHARED: they also
    see the document's first segment, from LOW2 = start to HIGH2; else tokens of its last segment
    see the whole document causally, and HIGH2 is unused."""
    first = tl.maximum(tl.load(first_ptr + row + index, mask=valid, other=0), start)
    past = tl.minimum(tl.load(past_ptr + row + index, mask=valid, other=0), end)
    high = tl.minimum(position + 1, past)
    if SHARED:
        at = tl.minimum(tl.maximum(start, 0), seqlen - 1)
        question_end = tl.load(past_ptr + row + at, mask=valid, other=0)
        question_end = tl.minimum(question_end, tl.load(end_ptr + row + at, mask=valid, other=0))
        joined = first <= question_end
        return (
            tl.where(joined, start, first),
            high,
            tl.where(joined, start, tl.minimum(question_end, end)),
        )
    return tl.where(past == end, start, first), high, high


@triton.jit
def _global_rows(position, start, end, left, right, count, CAUSAL: tl.constexpr):
    """Return (LOW, HIGH, HIGH2), with LOW2 = start, for a window and `count` global tokens at each
    document's start, which see and are seen by all of the document. CAUSAL: later tokens are
    hidden."""
    last = tl.minimum(end, position + 1) if CAUSAL else end
    low, high = _reach(position, left, right, start, end)
    global_end = tl.minimum(last, start + count)
    everything = position < global_end
    joined = everything | (low <= global_end)
    return (
        tl.where(joined, start, low),
        tl.where(everything, last, high),
        tl.where(joined, start, global_end),
    )


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def document_rows_kernel(
    start_ptr, end_ptr, first_ptr, past_ptr, prefix_ptr, counts, out, batch, chunks, seqlen, left,
    right, count,
    KIND: tl.constexpr, TOKENS: tl.constexpr, NOTES: tl.constexpr,
):  # fmt: skip
    """Kernel: one program fills a chunk of `out`, Mask.queries (5 or 7, B, S). counts: from
    count_kernel, read NOTES at a time; KIND and other arguments: as in
    masks.operators.document_rows."""
    _, row, index, valid = place(chunks, seqlen, TOKENS)
    start = tl.load(start_ptr + row + index, mask=valid, other=0)
    end = tl.load(end_ptr + row + index, mask=valid, other=0)
    low = start
    if KIND == "window":
        low, high = _reach(index, left, right, start, end)
    elif KIND == "prefix":
        prefix = tl.load(prefix_ptr + row + index, mask=valid, other=0)
        length = tl.minimum(tl.maximum(prefix.to(tl.int64), 0), seqlen).to(tl.int32)
        high = tl.minimum(end, tl.maximum(start + length, index + 1))
    elif KIND == "blocks":
        distance = index - start
        # Rounded down, also for tokens of no document, whose start may be anything.
        block = tl.where(distance < 0, -((count - 1 - distance) // count), distance // count) + 1
        high = tl.minimum(end.to(tl.int64), start + block.to(tl.int64) * count).to(tl.int32)
    elif KIND == "shared question":
        low, high, high2 = _segment_rows(
            index, start, end, first_ptr, past_ptr, end_ptr, row, index, valid, seqlen, True
        )
    elif KIND == "blockwise":
        low, high, high2 = _segment_rows(
            index, start, end, first_ptr, past_ptr, end_ptr, row, index, valid, seqlen, False
        )
    else:
        low, high, high2 = _global_rows(
            index, start, end, left, right, count, KIND == "causal global"
        )
    sequence = _ordinal(start, counts, index, valid, NOTES)
    step = tl.cast(batch, tl.int64) * seqlen
    out += row + index
    tl.store(out, low, mask=valid)
    tl.store(out + step, high, mask=valid)
    tl.store(out + 2 * step, index, mask=valid)
    tl.store(out + 3 * step, start, mask=valid)
    tl.store(out + 4 * step, sequence, mask=valid)
    if KIND == "shared question" or KIND == "global" or KIND == "causal global":
        tl.store(out + 5 * step, start, mask=valid)
        tl.store(out + 6 * step, high2, mask=valid)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def packed_rows_kernel(
    bounds_q, bounds_k, out, sequences, total_q, total_k, steps, left, right, TOKENS: tl.constexpr
):
    """Kernel: one program fills `out` (5, 1, T) for TOKENS tokens. Others: see
    packed_rows_launch, search_steps."""
    index = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    valid = index < total_q
    number = sequence_of(bounds_q, index, sequences, total_q, steps)
    begin, past = bounds_of(bounds_q, number, total_q)
    start, end = bounds_of(bounds_k, number, total_k)
    position = end - past + index
    low, high = _reach(position, left, right, start, end)
    inside = (index >= begin) & (index < past)
    step = tl.cast(total_q, tl.int64)
    out += index
    tl.store(out, tl.where(inside, low, 0), mask=valid)
    tl.store(out + step, tl.where(inside, high, 0), mask=valid)
    tl.store(out + 2 * step, tl.where(inside, position, 0), mask=valid)
    tl.store(out + 3 * step, tl.where(inside, start, 0), mask=valid)
    tl.store(out + 4 * step, number, mask=valid)


def search_steps(sequences: int) -> int:
    """Return how many halvings a binary search in N + 1 boundaries takes, for N sequences."""
    return (sequences + 1).bit_length()


def bounds_of_ids_launches(
    ids: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> tuple[Launch, Launch]:
    """Return the two launches, in order, that fill start and end (B, S) int32 from
    ids (B, S), contiguous."""
    chunks = ceil_div(ids.shape[1], TOKENS)
    # Two allocations: the second half of one may not be aligned to 16 bytes, for which
    # Triton would compile anew.
    first, last = (start.new_empty(ids.shape[0] * chunks) for _ in range(2))
    grid, options = (ids.shape[0] * chunks,), {"num_warps": 4}
    notes = Launch(
        notes_kernel, grid, (ids, first, last, chunks, ids.shape[1]), {"TOKENS": TOKENS}, options
    )
    constants = {"TOKENS": TOKENS, "NOTES": NOTES}
    args = (ids, first, last, start, end, chunks, ids.shape[1])
    return notes, Launch(bounds_of_ids_kernel, grid, args, constants, options)


def bounds_of_cu_seqlens_launch(
    cu_seqlens: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> Launch:
    """Return the launch that fills start and end (1, T) int32 from cu_seqlens
    (N + 1,), contiguous."""
    total, sequences = start.shape[1], cu_seqlens.shape[0] - 1
    args = (cu_seqlens, start, end, sequences, total, search_steps(sequences))
    return Launch(
        bounds_of_cu_seqlens_kernel,
        (ceil_div(total, TOKENS),),
        args,
        {"TOKENS": TOKENS},
        {"num_warps": 4},
    )


def document_rows_launches(
    out: torch.Tensor, kind: str, start: torch.Tensor, end: torch.Tensor,
    first: torch.Tensor | None,
    past: torch.Tensor | None, prefix: torch.Tensor | None, left: int, right: int, count: int,
) -> tuple[Launch, Launch]:  # fmt: skip
    """Return the two launches that fill `out` with Mask.queries. Others: see
    operators.document_rows; contiguous."""
    batch, seqlen = start.shape
    chunks = ceil_div(seqlen, TOKENS)
    grid, options = (batch * chunks,), {"num_warps": 4}
    counts = start.new_empty(grid)
    constants = {"TOKENS": TOKENS}
    # Those a kind has no use for are never read; they only have to be tensors.
    given = [start if x is None else x for x in (first, past, prefix)]
    if kind in ("global", "causal global"):
        count = min(count, seqlen)
    right = 0 if kind == "causal global" else right
    return (
        Launch(count_kernel, grid, (start, counts, chunks, seqlen), constants, options),
        Launch(
            document_rows_kernel,
            grid,
            (
                start,
                end,
                *given,
                counts,
                out,
                batch,
                chunks,
                seqlen,
                _bound(left),
                _bound(right),
                min(count, WIDEST),
            ),
            {"KIND": kind, **constants, "NOTES": NOTES},
            options,
        ),
    )


def packed_rows_launch(
    out: torch.Tensor,
    bounds_q: torch.Tensor,
    bounds_k: torch.Tensor,
    total_k: int,
    left: int,
    right: int,
) -> Launch:
    """Return the launch that fills `out` (5, 1, T), the rows LOW, HIGH, POSITION, START, SEQUENCE
    of Mask.queries. bounds_*: cu_seqlens (N + 1,), contiguous; total_k: keys in the row; left,
    right: window in tokens, -1: no bound."""
    total_q, sequences = out.shape[2], bounds_q.shape[0] - 1
    args = (
        bounds_q, bounds_k, out, sequences, total_q, total_k, search_steps(sequences), _bound(left),
        _bound(right)
    )  # fmt: skip
    tokens = TOKENS
    return Launch(
        packed_rows_kernel, (ceil_div(total_q, tokens),), args, {"TOKENS": tokens}, {"num_warps": 4}
    )


def _bound(side: int) -> int:
    return WIDEST if side < 0 else min(side, WIDEST)


# The operators of masks/operators.py, on the device that is current.


def bounds_of_ids(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    start, end = (torch.empty(ids.shape, dtype=torch.int32, device=ids.device) for _ in range(2))
    for launch in bounds_of_ids_launches(ids.contiguous(), start, end):
        launch.run()
    return start, end


def bounds_of_cu_seqlens(cu_seqlens: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    start, end = (
        torch.empty((1, total), dtype=torch.int32, device=cu_seqlens.device) for _ in range(2)
    )
    bounds_of_cu_seqlens_launch(cu_seqlens.contiguous(), start, end).run()
    return start, end


def document_rows(kind, start, end, first, past, prefix, left, right, count) -> torch.Tensor:
    out = start.new_empty(
        (7 if kind in ("shared question", "global", "causal global") else 5, *start.shape)
    )
    first, past, prefix = (x if x is None else x.contiguous() for x in (first, past, prefix))
    start, end = start.contiguous(), end.contiguous()
    for launch in document_rows_launches(
        out, kind, start, end, first, past, prefix, left, right, count
    ):
        launch.run()
    return out


def packed_rows(cu_seqlens_q, cu_seqlens_k, total_q, total_k, left, right) -> torch.Tensor:
    out = torch.empty((5, 1, total_q), dtype=torch.int32, device=cu_seqlens_q.device)
    packed_rows_launch(
        out, cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), total_k, left, right
    ).run()
    return out
