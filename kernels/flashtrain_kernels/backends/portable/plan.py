"""The kernels that build a mask's plan, the lists of tiles to visit (masks/plan.py), in two
launches and O(S) memory.

Bm batch rows of the mask, Sq queries, Sk keys.
"""

import torch
import triton
import triton.language as tl

from ...launch_cache import on_device
from ...masks.plan import empty_tables
from .launch import Launch, ceil_div
from .plan_summary import INT_MAX, NOT_SPECIALISED, interval, summary_kernel

_TOKENS = 1024  # tokens a program of the first launch reads
_CHUNK = 256  # tiles a program of the second judges at once


@triton.jit
def _judge(first, past, first_full, past_full, least, greatest):
    """Return (may a tile have a visible pair, are all its pairs visible) for one interval a query,
    from what `_summarised` returns for queries and the least and greatest position of keys; queries
    or keys are a vector of tiles."""
    return (first <= greatest) & (past > least), (first_full <= least) & (past_full > greatest)


@triton.jit
def _kinds_of_keys(
    tile,
    own,
    own2,
    summary,
    number,
    batch,
    tiles,
    seqlen_k,
    BLOCK,
    TWO: tl.constexpr,
    HAS_KEYS: tl.constexpr,
):
    """Return the kind of each tile `tile` of keys, 0 skip, 1 masked, 2 full, for the queries whose
    plan_summary.interval results are own and, with TWO, own2."""
    valid = (tile >= 0) & (tile < tiles)
    if HAS_KEYS:
        least = tl.load(summary + number * tiles + tile, mask=valid, other=0)
        greatest = tl.load(summary + (batch + number) * tiles + tile, mask=valid, other=0)
    else:
        least = tile * BLOCK
        greatest = tl.minimum(least + BLOCK, seqlen_k) - 1
    seen, full = _judge(own[0], own[1], own[2], own[3], least, greatest)
    if TWO:
        seen2, full2 = _judge(own2[0], own2[1], own2[2], own2[3], least, greatest)
        seen = seen | seen2
        full = full | full2
    full = full & ((tile + 1) * BLOCK <= seqlen_k)
    return tl.where(seen & valid, tl.where(full, 2, 1), 0)


@triton.jit
def _summarised(base, step, valid):
    """Load (first, past, first_full, past_full) of tiles of queries, as plan_summary.interval
    stored them: a query of the tile sees keys of [first, past) at most, and all of [first_full,
    past_full). valid: which tiles exist."""
    first = tl.load(base, mask=valid, other=0)
    past = tl.load(base + step, mask=valid, other=0)
    return (
        first,
        past,
        tl.load(base + 2 * step, mask=valid, other=0),
        tl.load(base + 3 * step, mask=valid, other=0),
    )


@triton.jit
def _kinds_of_queries(
    tile, least, greatest, summary, number, batch, tiles, seqlen_q, BLOCK, TWO: tl.constexpr
):
    """Return the kind of each tile `tile` of queries, 0 skip, 1 masked, 2 full, for the keys at
    positions from least to greatest."""
    valid = (tile >= 0) & (tile < tiles)
    step = tl.cast(batch, tl.int64) * tiles
    base = summary + number * tiles + tile
    first, past, first_full, past_full = _summarised(base, step, valid)
    seen, full = _judge(first, past, first_full, past_full, least, greatest)
    if TWO:
        first, past, first_full, past_full = _summarised(base + 4 * step, step, valid)
        seen2, full2 = _judge(first, past, first_full, past_full, least, greatest)
        seen = seen | seen2
        full = full | full2
    full = full & ((tile + 1) * BLOCK <= seqlen_q)
    return tl.where(seen & valid, tl.where(full, 2, 1), 0)


@triton.jit
def _count_runs(chosen, before, tile, count, first, length):
    """Return (count, first, length) of runs of chosen tiles after a further chunk of tiles: the
    number of runs, and the first tile and length of the first four. before: whether the tile before
    each one was chosen."""
    starts = chosen & (before == 0)
    number = count + tl.cumsum(starts.to(tl.int32), 0) - 1
    slot = tl.arange(0, 4)[None, :]
    mine = chosen[:, None] & (number[:, None] == slot)
    first = tl.minimum(first, tl.min(tl.where(mine, tile[:, None], INT_MAX), 0))
    length += tl.sum(mine.to(tl.int32), 0)
    count += tl.sum(starts.to(tl.int32), 0)
    return count, first, length


@triton.jit
def _store_row(table, masked_count, masked, masked_length, full_count, full, full_length, last):
    """Store the 16 numbers of a Plan table's row. If there are more than four masked or two full
    runs, one masked run holds all tiles from the first run that has no place in the row."""
    slot = tl.arange(0, 4)
    overflow = (masked_count > 4) | (full_count > 2)
    cut = tl.minimum(
        tl.min(tl.where(slot == 3, masked, INT_MAX), 0),
        tl.min(tl.where(slot == 2, full, INT_MAX), 0),
    )
    cut = tl.where(overflow, cut, INT_MAX)
    kept = masked < cut
    rest = (slot == tl.sum(kept.to(tl.int32), 0)) & overflow
    masked_length = tl.where(rest, last + 1 - cut, tl.where(kept, masked_length, 0))
    masked = tl.where(rest, cut, tl.where(kept, masked, 0))
    kept = full < cut
    full_length = tl.where(kept, full_length, 0)
    full = tl.where(kept, full, 0)
    masked_sum = tl.cumsum(masked_length, 0)
    full_sum = tl.cumsum(full_length, 0)
    tl.store(table + 1 + 2 * slot, masked)
    tl.store(table + tl.where(slot == 3, 0, 2 + 2 * slot), masked_sum)
    tl.store(table + 9 + 2 * slot, full, mask=slot < 2)
    tl.store(table + 10 - 2 * slot, full_sum, mask=slot < 2)
    tl.store(table + 12 + slot, tl.zeros([4], tl.int32))


@triton.jit
def _query_row(
    table, queries, summary, number, tile, batch, seqlen_q, seqlen_k, tiles,
    TWO: tl.constexpr, HAS_KEYS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Store one row of the forward or the dQ table: which tiles of keys the queries of `tile`
    visit."""
    row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    own = interval(queries, row, 0, batch, number, seqlen_q, 0)
    own2 = own
    begin = 0
    past = tiles
    low = own[0]
    high = own[1]
    if TWO:
        own2 = interval(queries, row, 5, batch, number, seqlen_q, 0)
        low = tl.minimum(low, own2[0])
        high = tl.maximum(high, own2[1])
    # The tiles lie in the order of their positions: nothing to find outside the hull.
    if not HAS_KEYS:
        begin = tl.maximum(low, 0) // BLOCK_K
        past = tl.minimum(tiles, (tl.minimum(high, seqlen_k) + BLOCK_K - 1) // BLOCK_K)
    masked_count, masked, masked_length, full_count, full, full_length, last = _no_runs(tile)
    for start in range(begin, past, CHUNK):
        other = start + tl.arange(0, CHUNK)
        kind = _kinds_of_keys(
            other, own, own2, summary, number, batch, tiles, seqlen_k, BLOCK_K, TWO, HAS_KEYS
        )
        before = _kinds_of_keys(
            other - 1, own, own2, summary, number, batch, tiles, seqlen_k, BLOCK_K, TWO, HAS_KEYS
        )
        masked_count, masked, masked_length = _count_runs(
            kind == 1, before == 1, other, masked_count, masked, masked_length
        )
        full_count, full, full_length = _count_runs(
            kind == 2, before == 2, other, full_count, full, full_length
        )
        last = tl.maximum(last, tl.max(tl.where(kind > 0, other, -1), 0))
    _store_row(table, masked_count, masked, masked_length, full_count, full, full_length, last)


@triton.jit
def _groups_between(least, greatest, summary, number, batch, groups, CHUNK: tl.constexpr):
    """Return the first and one past the last group of query tiles that may see keys at positions
    from least to greatest."""
    begin = groups
    past = groups * 0
    for start in range(0, groups, CHUNK):
        group = start + tl.arange(0, CHUNK)
        valid = group < groups
        first = tl.load(summary + number * groups + group, mask=valid, other=INT_MAX)
        end = tl.load(summary + (batch + number) * groups + group, mask=valid, other=-1)
        seen = (first <= greatest) & (end > least)
        begin = tl.minimum(begin, tl.min(tl.where(seen, group, INT_MAX), 0))
        past = tl.maximum(past, tl.max(tl.where(seen, group + 1, 0), 0))
    return begin, past


@triton.jit
def _key_row(
    table, keys, summary, group_summary, number, tile, batch, seqlen_q, seqlen_k, tiles, groups,
    TWO: tl.constexpr, HAS_KEYS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Store one row of the dK/dV table: which tiles of queries visit the keys of `tile`."""
    least = tile * BLOCK_K
    greatest = tl.minimum(least + BLOCK_K, seqlen_k) - 1
    if HAS_KEYS:
        key = least + tl.arange(0, BLOCK_K)
        position = tl.load(keys + number * seqlen_k + key, mask=key < seqlen_k, other=0)
        least = tl.min(tl.where(key < seqlen_k, position, INT_MAX), 0)
        greatest = tl.max(tl.where(key < seqlen_k, position, -1), 0)
    begin, past = _groups_between(least, greatest, group_summary, number, batch, groups, CHUNK)
    masked_count, masked, masked_length, full_count, full, full_length, last = _no_runs(tile)
    for start in range(begin * GROUP, tl.minimum(past * GROUP, tiles), CHUNK):
        other = start + tl.arange(0, CHUNK)
        kind = _kinds_of_queries(
            other, least, greatest, summary, number, batch, tiles, seqlen_q, BLOCK_Q, TWO
        )
        before = _kinds_of_queries(
            other - 1, least, greatest, summary, number, batch, tiles, seqlen_q, BLOCK_Q, TWO
        )
        masked_count, masked, masked_length = _count_runs(
            kind == 1, before == 1, other, masked_count, masked, masked_length
        )
        full_count, full, full_length = _count_runs(
            kind == 2, before == 2, other, full_count, full, full_length
        )
        last = tl.maximum(last, tl.max(tl.where(kind > 0, other, -1), 0))
    _store_row(table, masked_count, masked, masked_length, full_count, full, full_length, last)


@triton.jit
def _no_runs(tile):
    """Return (count, first, length) of masked and of full runs before any tile, and -1, the last
    visible tile so far; as tensors, which a loop can carry."""
    zero = tile * 0
    first = tl.full([4], INT_MAX, tl.int32)
    length = tl.zeros([4], tl.int32)
    return zero, first, length, zero, first, length, zero - 1


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def plan_kernel(
    queries, keys, query_summary, group_summary, fwd_summary, dq_summary, forward, dq, dkdv, batch,
    seqlen_q, seqlen_k,
    tiles_fwd_q, tiles_fwd_k, tiles_dq_q, tiles_dq_k, tiles_q, tiles_k, programs_q,
    TWO: tl.constexpr, HAS_KEYS: tl.constexpr, FWD_BLOCK_Q: tl.constexpr, FWD_BLOCK_K: tl.constexpr,
    DQ_BLOCK_Q: tl.constexpr, DQ_BLOCK_K: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Kernel: one program fills one row of a Plan's tables, first dK/dV's, which read most.
    *_summary: from summary_kernel; tiles_*: how many tiles of queries (q), keys (k) the forward
    (fwd), dQ (dq) or dK/dV has; *_BLOCK_*: tile sizes; TWO: a query has two ranges of keys; CHUNK:
    tiles tested at once; GROUP: query tiles a group."""
    programs = tiles_k + tiles_fwd_q + tiles_dq_q
    number = (tl.program_id(0) // programs).to(tl.int64)
    tile = tl.program_id(0) % programs
    if tile < tiles_k:
        table = dkdv + (number * tiles_k + tile) * 16
        _key_row(
            table, keys, query_summary, group_summary, number, tile, batch, seqlen_q, seqlen_k,
            tiles_q, programs_q,
            TWO, HAS_KEYS, BLOCK_Q, BLOCK_K, CHUNK, GROUP,
        )  # fmt: skip
    elif tile < tiles_k + tiles_fwd_q:
        tile -= tiles_k
        table = forward + (number * tiles_fwd_q + tile) * 16
        _query_row(
            table, queries, fwd_summary, number, tile, batch, seqlen_q, seqlen_k, tiles_fwd_k,
            TWO, HAS_KEYS, FWD_BLOCK_Q, FWD_BLOCK_K, CHUNK,
        )  # fmt: skip
    else:
        tile -= tiles_k + tiles_fwd_q
        table = dq + (number * tiles_dq_q + tile) * 16
        _query_row(
            table, queries, dq_summary, number, tile, batch, seqlen_q, seqlen_k, tiles_dq_k,
            TWO, HAS_KEYS, DQ_BLOCK_Q, DQ_BLOCK_K, CHUNK,
        )  # fmt: skip


def plan_launches(queries, keys, seqlen_k, blocks, tables) -> tuple[Launch, Launch]:
    """Return the two launches that fill a Plan's tables (forward, dq, dkdv). blocks:
    Plan.blocks; inputs contiguous."""
    fwd_q, fwd_k, dq_q, dq_k, block_q, block_k = blocks
    rows, batch, seqlen_q = queries.shape
    two, has_keys = rows == 7, keys is not None
    tiles_q, tiles_k = ceil_div(seqlen_q, block_q), ceil_div(seqlen_k, block_k)
    tiles_fwd_k, tiles_dq_k = ceil_div(seqlen_k, fwd_k), ceil_div(seqlen_k, dq_k)
    query_summary = queries.new_empty((8 if two else 4, batch, tiles_q))
    # Without keys these are never read; they only have to be tensors.
    fwd_summary = dq_summary = query_summary
    if has_keys:
        fwd_summary = dq_summary = queries.new_empty((2, batch, tiles_fwd_k))
        if dq_k != fwd_k:
            dq_summary = queries.new_empty((2, batch, tiles_dq_k))
    tokens = max(_TOKENS, *blocks)
    programs_q = ceil_div(seqlen_q, tokens)
    programs_fwd_k = ceil_div(seqlen_k, tokens) if has_keys else 0
    programs_dq_k = programs_fwd_k if dq_k != fwd_k else 0
    group_summary = queries.new_empty((2, batch, programs_q))
    tensors = (
        queries,
        keys if has_keys else queries,
        query_summary,
        group_summary,
        fwd_summary,
        dq_summary,
    )
    flags = {"TWO": two, "HAS_KEYS": has_keys}
    summary = Launch(
        kernel=summary_kernel,
        grid=((programs_q + programs_fwd_k + programs_dq_k) * batch,),
        args=(
            *tensors, batch, seqlen_q, seqlen_k, tiles_q, tiles_fwd_k, tiles_dq_k, programs_q,
            programs_fwd_k,
            programs_dq_k,
        ),
        constants={**flags, "BLOCK_Q": block_q, "FWD_BLOCK_K": fwd_k, "DQ_BLOCK_K": dq_k,
            "TOKENS": tokens},
        options={"num_warps": 4, "num_stages": 1},
    )  # fmt: skip
    tiles_fwd_q, tiles_dq_q = ceil_div(seqlen_q, fwd_q), ceil_div(seqlen_q, dq_q)
    rows_of_tables = Launch(
        kernel=plan_kernel,
        grid=((tiles_k + tiles_fwd_q + tiles_dq_q) * batch,),
        args=(
            *tensors, *tables, batch, seqlen_q, seqlen_k, tiles_fwd_q, tiles_fwd_k, tiles_dq_q,
            tiles_dq_k, tiles_q,
            tiles_k, programs_q,
        ),
        constants={
            **flags, "FWD_BLOCK_Q": fwd_q, "FWD_BLOCK_K": fwd_k, "DQ_BLOCK_Q": dq_q,
            "DQ_BLOCK_K": dq_k,
            "BLOCK_Q": block_q, "BLOCK_K": block_k, "CHUNK": _CHUNK, "GROUP": tokens // block_q,
        },
        # Unasked, the compiler aims at 64 registers for sm_100, and spills one.
        options={"num_warps": 4, "num_stages": 1, "maxnreg": 128},
    )  # fmt: skip
    return summary, rows_of_tables


def plan(queries, keys, seqlen_k, blocks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate and fill the tables (forward, dq, dkdv) of a Plan for these six tile sizes."""
    tables = empty_tables(queries, seqlen_k, blocks)
    with on_device(queries.device):
        for launch in plan_launches(queries, keys, seqlen_k, blocks, tables):
            launch.run()
    return tables
