"""Mask.queries, and where each token's document begins and ends, computed in plain
PyTorch, on any device.

B batch, S sequence, T packed tokens, N sequences.
"""

import torch
from torch import Tensor

# The rows of Mask.queries, by number.
LOW, HIGH, POSITION, START, SEQUENCE, LOW2, HIGH2 = range(7)
# A window this wide is no bound: positions are smaller, and their sum with it still fits 32 bits.
WIDEST = 2**30


def bounds_of_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    # Numbering the runs makes them increasing, which a search needs. Position 0 only shifts
    # its whole row. One sum for the whole batch: on a GPU a sum along a few long rows runs on
    # a few multiprocessors.
    run = (ids != ids.roll(1, 1)).flatten().cumsum(0).view(ids.shape)
    start = torch.searchsorted(run, run, right=False, out_int32=True)
    end = torch.searchsorted(run, run, right=True, out_int32=True)
    return start, end


def bounds_of_cu_seqlens(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    start, end, _ = _locate(cu_seqlens, total)
    return start[None], end[None]


def _locate(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each of `total` packed tokens its sequence's start and end (int32) and
    number (int64), (T,) each."""
    # Start and end are both 0 for a token in no sequence. Boundaries are clamped to [0, total]:
    # none points outside.
    bounds = cu_seqlens.to(torch.int64).clamp(0, total)
    index = torch.arange(total, device=cu_seqlens.device)
    # The last sequence that begins at or before the token: of several that begin there, all
    # but the last are empty.
    number = (torch.searchsorted(bounds, index, right=True) - 1).clamp(
        0, max(cu_seqlens.shape[0] - 2, 0)
    )
    start, end = bounds[number], bounds[number + 1]
    inside = (index >= start) & (index < end)
    return (
        torch.where(inside, start, 0).to(torch.int32),
        torch.where(inside, end, 0).to(torch.int32),
        number,
    )


def ordinals(start: Tensor) -> Tensor:
    """Number each token's document over the whole batch: (B, S) int64. start: (B, S), the
    document's first index."""
    first = (start == position_of(start)).to(torch.int64)
    return (first.flatten().cumsum(0) - 1).clamp(min=0).view(start.shape)


def document_rows(
    kind: str, start: Tensor, end: Tensor, first: Tensor | None, past: Tensor | None,
    prefix: Tensor | None,
    left: int, right: int, count: int,
) -> Tensor:  # fmt: skip
    rows = _ROWS[kind](position_of(start), start, end, first, past, prefix, left, right, count)
    return stacked(rows[0], rows[1], position_of(start), start, ordinals(start), *rows[2:])


def packed_rows(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, total_k: int, left: int, right: int
) -> Tensor:
    begin, past, number = _locate(cu_seqlens_q, total_q)
    bounds = cu_seqlens_k.to(torch.int64).clamp(0, total_k).to(torch.int32)
    start, end = bounds[number], bounds[number + 1]
    position = end - past + torch.arange(total_q, device=start.device, dtype=torch.int32)
    low, high = reach(position, (left, right), start, end)
    inside = past > begin
    rows = [torch.where(inside, row, 0)[None] for row in (low, high, position, start)]
    return stacked(*rows, number[None])


def stacked(*rows: Tensor) -> Tensor:
    """Stack the rows of Mask.queries, each (Bm, Sq) or broadcasting to it, to one int32 tensor."""
    return torch.stack(torch.broadcast_tensors(*[row.to(torch.int32) for row in rows]))


def reach(
    position: Tensor, window: tuple[int, int], start: Tensor, end: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (LOW, HIGH): queries see the keys [LOW, HIGH), those in their window (left,
    right) and in [start, end)."""
    left, right = window
    low = start if left < 0 else torch.maximum(start, position - min(left, WIDEST))
    high = end if right < 0 else torch.minimum(end, position + (min(right, WIDEST) + 1))
    return low, high


def position_of(like: Tensor) -> Tensor:
    """Return (1, S) int32: 0, 1, 2, ..., S - 1 for a tensor (B, S), on its device."""
    return torch.arange(like.shape[1], device=like.device, dtype=torch.int32)[None]


# LOW and HIGH, and with two intervals LOW2 and HIGH2, of each kind of mask.


def _window(position, start, end, first, past, prefix, left, right, count) -> tuple[Tensor, ...]:
    return reach(position, (left, right), start, end)


def _prefix(position, start, end, first, past, prefix, left, right, count) -> tuple[Tensor, ...]:
    length = prefix.clamp(0, prefix.shape[1]).to(torch.int32)
    return start, torch.minimum(end, torch.maximum(start + length, position + 1))


def _blocks(position, start, end, first, past, prefix, left, right, count) -> tuple[Tensor, ...]:
    count = min(count, WIDEST)
    block = torch.div(position - start, count, rounding_mode="floor") + 1
    # Not past the row's end, whatever the block size, so that 32 bits hold it.
    return start, torch.minimum(end.to(torch.int64), start + block.to(torch.int64) * count)


def _shared_question(
    position, start, end, first, past, prefix, left, right, count
) -> tuple[Tensor, ...]:
    first, past = torch.maximum(first, start), torch.minimum(past, end)
    question_end = _at(past, start)
    joined = first <= question_end  # the first answer follows the question directly: one interval
    low = torch.where(joined, start, first)
    high2 = torch.where(joined, start, torch.minimum(question_end, end))
    return low, torch.minimum(position + 1, past), start, high2


def _blockwise(position, start, end, first, past, prefix, left, right, count) -> tuple[Tensor, ...]:
    first, past = torch.maximum(first, start), torch.minimum(past, end)
    return torch.where(past == end, start, first), torch.minimum(position + 1, past)


def _global(
    position, start, end, first, past, prefix, left, right, count, last=None
) -> tuple[Tensor, ...]:
    last = end if last is None else last
    low, high = reach(position, (left, right), start, end)
    global_end = torch.minimum(last, start + min(count, start.shape[1]))
    everything = position < global_end
    joined = everything | (low <= global_end)  # one interval
    low, high = torch.where(joined, start, low), torch.where(everything, last, high)
    return low, high, start, torch.where(joined, start, global_end)


def _causal_global(
    position, start, end, first, past, prefix, left, right, count
) -> tuple[Tensor, ...]:
    last = torch.minimum(end, position + 1)
    return _global(position, start, end, first, past, prefix, left, 0, count, last)


def _at(x: Tensor, index: Tensor) -> Tensor:
    """Return, for x and index (B, S), x[b, index[b, i]] with the index clamped into the row."""
    return x.gather(1, index.clamp(0, max(x.shape[1] - 1, 0)).to(torch.int64))


_ROWS = {
    "window": _window,
    "prefix": _prefix,
    "blocks": _blocks,
    "shared question": _shared_question,
    "blockwise": _blockwise,
    "global": _global,
    "causal global": _causal_global,
}
