"""A mask's plan: which tiles of keys each tile of queries must visit, and which tiles of
queries each tile of keys.

Sq queries, Sk keys; Bm is the batch, or 1 for a mask that all its rows share. The operator
`flashtrain_kernels::plan` makes it on the mask's device, without waiting: on a CPU in PyTorch, on a
GPU by kernels (registered in ops.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .operators import register_vmap
from .rows import HIGH, HIGH2, LOW, LOW2

COLUMNS = 16
_INT_MAX = 2**31 - 1

torch.library.define(
    "flashtrain_kernels::plan",
    "(Tensor queries, Tensor? keys, SymInt seqlen_k, int[] blocks) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
PLAN = torch.ops.flashtrain_kernels.plan.default


class Plan(NamedTuple):
    """Which tiles each kernel visits under a mask: made once a batch, on the
    device, for every layer.

    For each tile of queries (forward, dQ) or of keys (dK/dV), a table has one row of sixteen
    numbers, which name tiles of the other side:

        [pc, p0, c1, p1, c2, p2, c3, p3,  fc, f0, d1, f1,  0, 0, 0, 0]

    pc tiles are partly hidden, in up to four runs: step i visits tile p0 + i for i < c1, p1 +
    i - c1 for i < c2, p2 + i
    - c2 for i < c3, then p3 + i - c3. fc tiles are wholly visible, in up to two runs: f0 + i for i
    < d1, then f1 + i - d1. Unused counts repeat the total. A tile is listed at most once, and every
    tile with a visible pair is.

    Attributes:
        forward, dq: (Bm, tiles of queries, 16) int32, tables for the forward and dQ kernels.
        dkdv: (Bm, tiles of keys, 16) int32, the table for the dK/dV kernel.
        blocks: six tile sizes that the plan is for: (queries, keys) of the forward, then the dQ,
            then the dK/dV kernel.
    """

    forward: Tensor
    dq: Tensor
    dkdv: Tensor
    blocks: tuple[int, ...]


@torch.library.register_fake("flashtrain_kernels::plan")
def _fake_plan(
    queries: Tensor, keys: Tensor | None, seqlen_k: int, blocks: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_tables(queries, seqlen_k, blocks)


def empty_tables(
    queries: Tensor, seqlen_k: int, blocks: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the tables (forward, dq, dkdv) of a Plan, each (Bm, tiles, 16) int32."""
    batch, seqlen_q = queries.shape[1], queries.shape[2]
    counts = (seqlen_q + blocks[0] - 1) // blocks[0], (seqlen_q + blocks[2] - 1) // blocks[2]
    forward, dq = (
        queries.new_empty((batch, count, COLUMNS), dtype=torch.int32) for count in counts
    )
    tiles = (seqlen_k + blocks[5] - 1) // blocks[5]
    return forward, dq, queries.new_empty((batch, tiles, COLUMNS), dtype=torch.int32)


def build_plan_reference(
    queries: Tensor, keys: Tensor | None, seqlen_k: int, blocks: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the tables of a Plan in plain PyTorch, equal to the kernels'; takes
    memory of tiles times tiles."""
    forward = _kinds(queries, keys, seqlen_k, blocks[0], blocks[1], loops_over_keys=True)
    dq = _kinds(queries, keys, seqlen_k, blocks[2], blocks[3], loops_over_keys=True)
    dkdv = _kinds(queries, keys, seqlen_k, blocks[4], blocks[5], loops_over_keys=False)
    return _table(forward), _table(dq), _table(dkdv)


torch.library.impl("flashtrain_kernels::plan", "cpu", build_plan_reference)
register_vmap("flashtrain_kernels::plan", PLAN)


# A tile of queries is summarised by the hull and the intersection of its rows' intervals, a tile of
# keys by its least and greatest position. Below the hull it is skipped, inside the intersection
# (and inside Sq and Sk on the looped side) it is full, else it is masked: never wrongly skipped or
# full, whatever the order of the keys.
def _kinds(
    queries: Tensor,
    keys: Tensor | None,
    seqlen_k: int,
    block_q: int,
    block_k: int,
    loops_over_keys: bool,
) -> Tensor:
    """Return (Bm, owned tiles, looped tiles): 0 for a tile to skip, 1 masked, 2 full. Each program
    owns a tile, of queries if it loops over keys, else of keys."""
    least, greatest = _key_ranges(queries, keys, seqlen_k, block_k)
    seen, full = _compare(queries[LOW], queries[HIGH], least, greatest, block_q)
    if queries.shape[0] == 7:
        seen2, full2 = _compare(queries[LOW2], queries[HIGH2], least, greatest, block_q)
        seen, full = seen | seen2, full | full2
    if loops_over_keys:
        inside = (torch.arange(seen.shape[2], device=seen.device) + 1) * block_k <= seqlen_k
        return seen.int() + (seen & full & inside)
    inside = (torch.arange(seen.shape[1], device=seen.device) + 1) * block_q <= queries.shape[2]
    return (seen.int() + (seen & full & inside[:, None])).transpose(1, 2)


def _key_ranges(
    queries: Tensor, keys: Tensor | None, seqlen_k: int, block: int
) -> tuple[Tensor, Tensor]:
    """The least and the greatest position of each tile of keys, (Bm, tiles) each."""
    if keys is None:
        keys = torch.arange(seqlen_k, device=queries.device, dtype=torch.int32).expand(
            queries.shape[1], -1
        )
    return _tiled(keys, block, _INT_MAX).amin(-1), _tiled(keys, block, -1).amax(-1)


def _compare(
    low: Tensor, high: Tensor, least: Tensor, greatest: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    """Return two (Bm, nq, nk) bool tensors, for each tile of queries and of keys: whether a pair
    may be visible by the interval [low, high), and whether all are. least, greatest: from
    _key_ranges; block: queries in a tile."""
    empty = low >= high
    low, high = torch.where(empty, _INT_MAX, low), torch.where(empty, -1, high)
    first, past = _tiled(low, block, _INT_MAX).amin(-1), _tiled(high, block, -1).amax(-1)
    first_full, past_full = _tiled(low, block, -1).amax(-1), _tiled(high, block, _INT_MAX).amin(-1)
    least, greatest = least[:, None, :], greatest[:, None, :]
    seen = (first[:, :, None] <= greatest) & (past[:, :, None] > least)
    full = (first_full[:, :, None] <= least) & (past_full[:, :, None] > greatest)
    return seen, full


def _tiled(x: Tensor, block: int, fill: int) -> Tensor:
    """Return x (Bm, S) as (Bm, tiles, block), the last tile filled up with `fill`."""
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % block), value=fill)
    return x.reshape(x.shape[0], x.shape[1] // block, block)


def _table(kinds: Tensor) -> Tensor:
    """Return the rows (Bm, n, 16) of a Plan table for kinds of tiles (Bm, n, m), as `_kinds`
    returns them."""
    table = torch.zeros(*kinds.shape[:2], COLUMNS, dtype=torch.int32, device=kinds.device)
    if kinds.shape[2] == 0:
        return table
    index = torch.arange(kinds.shape[2], device=kinds.device)
    masked_count, masked, masked_length = _runs(kinds == 1, index)
    full_count, full, full_length = _runs(kinds == 2, index)
    # Past the places: from `cut` on, the first run without a place, one masked
    # run takes everything.
    overflow = (masked_count > 4) | (full_count > 2)
    cut = torch.where(overflow, torch.minimum(masked[..., 3], full[..., 2]), _INT_MAX)[..., None]
    last = torch.where(kinds > 0, index, -1).amax(-1, keepdim=True)
    slot = torch.arange(4, device=kinds.device)
    here = slot == (masked < cut).sum(-1, keepdim=True)
    rest = here & overflow[..., None]
    masked_length = torch.where(rest, last + 1 - cut, torch.where(masked < cut, masked_length, 0))
    masked = torch.where(rest, cut, torch.where(masked < cut, masked, 0))
    full_length = torch.where(full < cut, full_length, 0)[..., :2]
    full = torch.where(full < cut, full, 0)[..., :2]
    table[..., 1:8:2], table[..., 9:12:2] = masked.int(), full.int()
    masked_sum, full_sum = masked_length.cumsum(-1).int(), full_length.cumsum(-1).int()
    table[..., 0], table[..., 2:8:2] = masked_sum[..., 3], masked_sum[..., :3]
    table[..., 8], table[..., 10] = full_sum[..., 1], full_sum[..., 0]
    return table


def _runs(chosen: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of runs of True in the last dimension, and the first tile (_INT_MAX where
    there is none) and the length of the first four runs, (..., 4) each."""
    starts = chosen & ~torch.nn.functional.pad(chosen, (1, 0))[..., :-1]
    number = starts.cumsum(-1) - 1
    first = [torch.where(starts & (number == run), index, _INT_MAX).amin(-1) for run in range(4)]
    length = [(chosen & (number == run)).sum(-1) for run in range(4)]
    return starts.sum(-1), torch.stack(first, -1), torch.stack(length, -1)
