"""The one description of a mask that the kernels and the reference read: intervals of key positions, one row a query;
and its plan: which tiles of the other side each tile of queries, or of keys, must visit.

B batch, Sq queries, Sk keys; Bm is B, or 1 for a mask that every row of the batch shares. A plan is made once a batch
by the operator `flashtrain_kernels::plan`, on the device and without waiting for it; every layer's kernels read it. On
a CPU PyTorch builds it (`build_plan_reference`), on a GPU the kernels do, which ops.py registers.

A table of it holds 16 int32 for each tile of queries (forward, dQ) or of keys (dK/dV), in tiles of the other side:

    [pc, p0, c1, p1, c2, p2, c3, p3,  fc, f0, d1, f1,  0, 0, 0, 0]

pc tiles need the mask, in up to four runs: step i visits p0 + i below c1, p1 + i - c1 below c2, p2 + i - c2 below c3,
then p3 + i - c3. fc tiles are wholly visible, in up to two runs: f0 + i below d1, then f1 + i - d1. Unused counts
repeat the total. No tile comes twice, and every tile with a visible pair comes.

How a tile is judged: a tile of queries is summarised by the hull and the intersection of its rows' intervals, a tile of
keys by its least and greatest position. Below the hull it is skipped, inside the intersection (and inside Sq and Sk on
the looped side) it is full, else it is masked: never wrongly skipped or full, whatever the order of the keys. Where
there are more runs than places, one masked run takes everything from the first run without a place.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import INTEGERS, check_device, check_dtype
from .operators import packed_rows, register_vmap
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
    """Which tiles each tile of each kernel visits: made once a batch, on the device, and shared by every layer.

    forward, dq: (Bm, query tiles, 16) int32, in key tiles; dkdv: (Bm, key tiles, 16) int32, in query tiles. The
    sixteen numbers: see the top of this file.
    blocks: the tile sizes it was made for: queries and keys a tile of the forward, the dQ and the dK/dV kernel.
    """

    forward: Tensor
    dq: Tensor
    dkdv: Tensor
    blocks: tuple[int, ...]


@torch.library.register_fake("flashtrain_kernels::plan")
def _fake_plan(queries: Tensor, keys: Tensor | None, seqlen_k: int, blocks: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    return empty_tables(queries, seqlen_k, blocks)


def empty_tables(queries: Tensor, seqlen_k: int, blocks: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The three tables (Bm, tiles, 16) int32, not filled."""
    batch, seqlen_q = queries.shape[1], queries.shape[2]
    counts = (seqlen_q + blocks[0] - 1) // blocks[0], (seqlen_q + blocks[2] - 1) // blocks[2]
    forward, dq = (queries.new_empty((batch, count, COLUMNS), dtype=torch.int32) for count in counts)
    tiles = (seqlen_k + blocks[5] - 1) // blocks[5]
    return forward, dq, queries.new_empty((batch, tiles, COLUMNS), dtype=torch.int32)


def build_plan_reference(
    queries: Tensor, keys: Tensor | None, seqlen_k: int, blocks: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator in plain PyTorch: the same tables, number for number. Its memory grows with tiles times tiles."""
    forward = _kinds(queries, keys, seqlen_k, blocks[0], blocks[1], loops_over_keys=True)
    dq = _kinds(queries, keys, seqlen_k, blocks[2], blocks[3], loops_over_keys=True)
    dkdv = _kinds(queries, keys, seqlen_k, blocks[4], blocks[5], loops_over_keys=False)
    return _table(forward), _table(dq), _table(dkdv)


torch.library.impl("flashtrain_kernels::plan", "cpu", build_plan_reference)
register_vmap("flashtrain_kernels::plan", PLAN)


def _kinds(
    queries: Tensor, keys: Tensor | None, seqlen_k: int, block_q: int, block_k: int, loops_over_keys: bool
) -> Tensor:
    """(Bm, owned tiles, looped tiles): 0 for a tile to skip, 1 masked, 2 full."""
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


def _key_ranges(queries: Tensor, keys: Tensor | None, seqlen_k: int, block: int) -> tuple[Tensor, Tensor]:
    """The least and the greatest position of each tile of keys, (Bm, tiles) each."""
    if keys is None:
        keys = torch.arange(seqlen_k, device=queries.device, dtype=torch.int32).expand(queries.shape[1], -1)
    return _tiled(keys, block, _INT_MAX).amin(-1), _tiled(keys, block, -1).amax(-1)


def _compare(low: Tensor, high: Tensor, least: Tensor, greatest: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """For each tile of queries and of keys (Bm, nq, nk): may a pair be visible, and are all, by one interval?"""
    empty = low >= high
    low, high = torch.where(empty, _INT_MAX, low), torch.where(empty, -1, high)
    first, past = _tiled(low, block, _INT_MAX).amin(-1), _tiled(high, block, -1).amax(-1)
    first_full, past_full = _tiled(low, block, -1).amax(-1), _tiled(high, block, _INT_MAX).amin(-1)
    least, greatest = least[:, None, :], greatest[:, None, :]
    seen = (first[:, :, None] <= greatest) & (past[:, :, None] > least)
    full = (first_full[:, :, None] <= least) & (past_full[:, :, None] > greatest)
    return seen, full


def _tiled(x: Tensor, block: int, fill: int) -> Tensor:
    """(Bm, S) -> (Bm, tiles, block), filled up."""
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % block), value=fill)
    return x.reshape(x.shape[0], x.shape[1] // block, block)


def _table(kinds: Tensor) -> Tensor:
    """(Bm, n, m) kinds of tiles -> (Bm, n, 16): their runs."""
    table = torch.zeros(*kinds.shape[:2], COLUMNS, dtype=torch.int32, device=kinds.device)
    if kinds.shape[2] == 0:
        return table
    index = torch.arange(kinds.shape[2], device=kinds.device)
    masked_count, masked, masked_length = _runs(kinds == 1, index)
    full_count, full, full_length = _runs(kinds == 2, index)
    # Past the places: from `cut` on, the first run without a place, one masked run takes everything.
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
    """How many runs of True, and the first tile (none: _INT_MAX) and the length of the first four of them."""
    starts = chosen & ~torch.nn.functional.pad(chosen, (1, 0))[..., :-1]
    number = starts.cumsum(-1) - 1
    first = [torch.where(starts & (number == run), index, _INT_MAX).amin(-1) for run in range(4)]
    length = [(chosen & (number == run)).sum(-1) for run in range(4)]
    return starts.sum(-1), torch.stack(first, -1), torch.stack(length, -1)


class Sequences(NamedTuple):
    """Sequences packed into one row, by where they end: a mask that is not made, for kernels that need no more.

    cu_seqlens_q, cu_seqlens_k: (N + 1,) int32, contiguous: 0, then where each sequence's queries and keys end.
    seqlen_q, seqlen_k: Sq and Sk of the row; tokens past the last end see nothing and are not seen.
    window: (left, right), -1 for no bound, aligned bottom-right within each sequence.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqlen_q: int
    seqlen_k: int
    window: tuple[int, int]

    @property
    def number(self) -> int:
        """N."""
        return self.cu_seqlens_q.shape[0] - 1

    def mask(self) -> "Mask":
        """The Mask of them, Bm = 1, made on their device."""
        rows = packed_rows(self.cu_seqlens_q, self.cu_seqlens_k, self.seqlen_q, self.seqlen_k, *self.window)
        return Mask(rows, None, self.seqlen_k, sequences=self)


class Mask(NamedTuple):
    """Which keys each query sees, as at most two intervals of key positions a query.

    queries: (5 or 7, Bm, Sq) int32, contiguous. Its rows, by the names in rows.py:
        LOW, HIGH    the query sees the keys whose position p has LOW <= p < HIGH,
        LOW2, HIGH2  and those with LOW2 <= p < HIGH2 (with 7 rows; the two intervals may overlap)
        POSITION     the query's own position among the keys: what ALiBi's distance is measured from
        START        the first key position of the query's sequence (document): what dropout counts from
        SEQUENCE     the ordinal of that sequence in the batch: what dropout, and ALiBi slopes of their own, go by
    keys: (Bm, Sk) int32, each key's position; None: key j is at position j. Positions stay below 2^30.
    seqlen_k: Sk.
    plan: the tiles to visit, from `planned`.
    band: (left, right) where the mask is that window over one sequence, -1 for no bound, and nothing else, as
        `masks.causal` makes it: a caller may then do without the mask. None: not known to be.
    sequences: where the mask is that of packed sequences, as `masks.varlen` makes it: kernels may then do without it.

    Positions are absolute, so the same mask serves a sequence in any order and any part of one: `select`.
    A NamedTuple of tensors, so torch.compile and activation checkpointing pass it through. The functions of
    `flashtrain_kernels.masks` make the usual ones; anything of this form is a mask.
    """

    queries: Tensor
    keys: Tensor | None
    seqlen_k: int
    plan: Plan | None = None
    band: tuple[int, int] | None = None
    sequences: Sequences | None = None

    def dense(self) -> Tensor:
        """(Bm, Sq, Sk) bool, True where a query sees a key. For tests and small sizes: it is the whole matrix."""
        if self.keys is None:
            position = torch.arange(self.seqlen_k, device=self.queries.device, dtype=torch.int32)[None, None, :]
        else:
            position = self.keys[:, None, :]
        rows = self.queries[:, :, :, None]
        seen = (position >= rows[LOW]) & (position < rows[HIGH])
        if self.queries.shape[0] == 7:
            seen = seen | ((position >= rows[LOW2]) & (position < rows[HIGH2]))
        return seen

    def select(self, queries: Tensor, keys: Tensor) -> "Mask":
        """The mask of some of the queries and keys, in the order given: dense() indexed in both, and nothing more.

        Args:
            queries: (n,).
            keys: (m,) integer indices on the mask's device, within Sq and Sk (not checked: that would wait for the
                device). For context parallelism: a rank's own queries and the keys in the order it holds them.

        Raises:
            TypeError, ValueError: anything that is no such tensor.
        """
        for name, index in (("queries", queries), ("keys", keys)):
            check_dtype(name, index, "(n,)", INTEGERS)
            if index.dim() != 1:
                raise ValueError(f"{name} must have one dimension, not the shape {tuple(index.shape)}")
            check_device(name, index, self.queries.device, "mask.queries")
        if self.keys is None:
            positions = keys.to(torch.int32).expand(self.queries.shape[1], -1).contiguous()
        else:
            positions = self.keys.index_select(1, keys)
        return Mask(self.queries.index_select(2, queries), positions, keys.shape[0])

    def planned(self, head_dim: int, dtype: torch.dtype, *, rich: bool = False, softcap: bool = False) -> "Mask":
        """This mask with the plan for attention of this head dimension and dtype; itself where nothing is to be done.

        Kernel calls need a plan and make one where it is missing (but for packed sequences that the Hopper kernels find
        by themselves): call this once a batch and give the result to every layer. Waits for nothing.

        Args:
            rich, softcap: for calls with ALiBi, a bias or dropout, or with a softcap.
        """
        blocks = None if _plan_blocks is None else _plan_blocks(self, head_dim, dtype, rich, softcap)
        return self if blocks is None else self.planned_for(blocks)

    def planned_for(self, blocks: tuple[int, ...]) -> "Mask":
        """This mask with a plan for tiles of these sizes (see Plan.blocks); itself where it has that plan."""
        if self.plan is not None and self.plan.blocks == tuple(blocks):
            return self
        return self._replace(plan=build_plan(self, tuple(blocks)))


def build_plan(mask: Mask, blocks: tuple[int, ...]) -> Plan:
    """The plan of a mask for tiles of the sizes `blocks` (see Plan), each a power of two of at least 16.

    Raises ValueError for other block sizes.
    """
    if len(blocks) != 6 or any(block < 16 or block & (block - 1) for block in blocks):
        raise ValueError(f"blocks must be six powers of two of at least 16, not {tuple(blocks)}")
    forward, dq, dkdv = PLAN(mask.queries, mask.keys, mask.seqlen_k, list(blocks))
    return Plan(forward, dq, dkdv, tuple(blocks))


# The tile sizes to plan for (mask, D, dtype, rich, softcap) are the kernels' to say, None where none run. The kernels
# know masks, and masks know no kernels: dispatch.py registers this.
PlanBlocks = Callable[[Mask, int, torch.dtype, bool, bool], tuple[int, ...] | None]
_plan_blocks: PlanBlocks | None = None


def register_plan_blocks(function: PlanBlocks) -> None:
    """Let `Mask.planned` ask this function for tile sizes (see Plan.blocks)."""
    global _plan_blocks
    _plan_blocks = function
