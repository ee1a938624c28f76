"""The kernels that fill the rows of masks (Mask.queries): of documents in a row, and of sequences packed into one.

B batch, S sequence, T packed tokens, N sequences. A program fills a chunk of TOKENS tokens of a row. What each kind of
mask sees is written as in masks/rows.py, which says why.
"""

import torch
import triton
import triton.language as tl

from ...masks.rows import WIDEST
from . import documents
from .documents import bounds_of, bounds_of_cu_seqlens_launch, bounds_of_ids_launches, place, search_steps, sequence_of
from .launch import Launch, ceil_div

NOT_SPECIALISED = [
    "batch", "seqlen", "chunks", "left", "right", "count", "sequences", "total_q", "total_k", "steps"
]  # fmt: skip


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def count_kernel(start, counts, chunks, seqlen, TOKENS: tl.constexpr):
    """How many documents begin in each chunk."""
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
    """LOW and HIGH under an inclusive window; no bound is one of WIDEST."""
    return tl.maximum(start, position - left), tl.minimum(end, position + right + 1)


@triton.jit
def _segment_rows(position, start, end, first_ptr, past_ptr, end_ptr, row, index, valid, seqlen, SHARED: tl.constexpr):
    """Segments that see themselves causally. SHARED: and the first one; else the last one sees the whole document."""
    first = tl.maximum(tl.load(first_ptr + row + index, mask=valid, other=0), start)
    past = tl.minimum(tl.load(past_ptr + row + index, mask=valid, other=0), end)
    high = tl.minimum(position + 1, past)
    if SHARED:
        at = tl.minimum(tl.maximum(start, 0), seqlen - 1)
        question_end = tl.load(past_ptr + row + at, mask=valid, other=0)
        question_end = tl.minimum(question_end, tl.load(end_ptr + row + at, mask=valid, other=0))
        joined = first <= question_end
        return tl.where(joined, start, first), high, tl.where(joined, start, tl.minimum(question_end, end))
    return tl.where(past == end, start, first), high, high


@triton.jit
def _global_rows(position, start, end, left, right, count, CAUSAL: tl.constexpr):
    """A window, and the document's first `count` tokens, which see everything in it and are seen by all of it."""
    last = tl.minimum(end, position + 1) if CAUSAL else end
    low, high = _reach(position, left, right, start, end)
    global_end = tl.minimum(last, start + count)
    everything = position < global_end
    joined = everything | (low <= global_end)
    return tl.where(joined, start, low), tl.where(everything, last, high), tl.where(joined, start, global_end)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def document_rows_kernel(
    start_ptr, end_ptr, first_ptr, past_ptr, prefix_ptr, counts, out, batch, chunks, seqlen, left, right, count,
    KIND: tl.constexpr, TOKENS: tl.constexpr, NOTES: tl.constexpr,
):  # fmt: skip
    """out (5 or 7, B, S) of a mask within documents."""
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
        low, high, high2 = _global_rows(index, start, end, left, right, count, KIND == "causal global")
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
def packed_rows_kernel(bounds_q, bounds_k, out, sequences, total_q, total_k, steps, left, right, TOKENS: tl.constexpr):
    """out (5, 1, T) of packed sequences, under a window aligned bottom-right within each."""
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


def document_rows_launches(
    out: torch.Tensor, kind: str, start: torch.Tensor, end: torch.Tensor, first: torch.Tensor | None,
    past: torch.Tensor | None, prefix: torch.Tensor | None, left: int, right: int, count: int,
) -> tuple[Launch, Launch]:  # fmt: skip
    """The two launches, in this order, that fill out. Tensors are contiguous; see masks.operators.document_rows."""
    batch, seqlen = start.shape
    chunks = ceil_div(seqlen, documents.TOKENS)
    grid, options = (batch * chunks,), {"num_warps": 4}
    counts = start.new_empty(grid)
    constants = {"TOKENS": documents.TOKENS}
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
            (start, end, *given, counts, out, batch, chunks, seqlen, _bound(left), _bound(right), min(count, WIDEST)),
            {"KIND": kind, **constants, "NOTES": documents.NOTES},
            options,
        ),
    )


def packed_rows_launch(
    out: torch.Tensor, bounds_q: torch.Tensor, bounds_k: torch.Tensor, total_k: int, left: int, right: int
) -> Launch:
    """The launch that fills out (5, 1, T). The boundaries (N + 1,) are contiguous."""
    total_q, sequences = out.shape[2], bounds_q.shape[0] - 1
    args = (
        bounds_q, bounds_k, out, sequences, total_q, total_k, search_steps(sequences), _bound(left), _bound(right)
    )  # fmt: skip
    tokens = documents.TOKENS
    return Launch(packed_rows_kernel, (ceil_div(total_q, tokens),), args, {"TOKENS": tokens}, {"num_warps": 4})


def _bound(side: int) -> int:
    return WIDEST if side < 0 else min(side, WIDEST)


# The operators of masks/operators.py, on the device that is current.


def bounds_of_ids(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    start, end = (torch.empty(ids.shape, dtype=torch.int32, device=ids.device) for _ in range(2))
    for launch in bounds_of_ids_launches(ids.contiguous(), start, end):
        launch.run()
    return start, end


def bounds_of_cu_seqlens(cu_seqlens: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    start, end = (torch.empty((1, total), dtype=torch.int32, device=cu_seqlens.device) for _ in range(2))
    bounds_of_cu_seqlens_launch(cu_seqlens.contiguous(), start, end).run()
    return start, end


def document_rows(kind, start, end, first, past, prefix, left, right, count) -> torch.Tensor:
    out = start.new_empty((7 if kind in ("shared question", "global", "causal global") else 5, *start.shape))
    first, past, prefix = (x if x is None else x.contiguous() for x in (first, past, prefix))
    start, end = start.contiguous(), end.contiguous()
    for launch in document_rows_launches(out, kind, start, end, first, past, prefix, left, right, count):
        launch.run()
    return out


def packed_rows(cu_seqlens_q, cu_seqlens_k, total_q, total_k, left, right) -> torch.Tensor:
    out = torch.empty((5, 1, total_q), dtype=torch.int32, device=cu_seqlens_q.device)
    packed_rows_launch(out, cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), total_k, left, right).run()
    return out
