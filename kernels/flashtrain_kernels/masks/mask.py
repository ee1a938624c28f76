"""The one description of a mask that the kernels and the reference read: intervals of key positions, one row a query.

B batch, Sq queries, Sk keys; Bm is B, or 1 for a mask that every row of the batch shares.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import INTEGERS, check_device, check_dtype
from .operators import packed_rows
from .plan import PLAN, Plan
from .rows import HIGH, HIGH2, LOW, LOW2


class Sequences(NamedTuple):
    """Sequences packed into one row, by where they end: a mask that is not made, for kernels that need no more.

    Attributes:
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

    Positions are absolute, so the same mask serves a sequence in any order and any part of one: `select`.
    A NamedTuple of tensors, so torch.compile and activation checkpointing pass it through. The functions of
    `flashtrain_kernels.masks` make the usual ones; anything of this form is a mask.

    Attributes:
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
        sequences: where the mask is that of packed sequences, as `masks.varlen` makes it: kernels may do without it.
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
        """This mask with a plan for tiles of these sizes (see Plan.blocks), powers of two from 16 on; itself where it
        has that plan. Raises ValueError for other sizes."""
        if self.plan is not None and self.plan.blocks == tuple(blocks):
            return self
        if len(blocks) != 6 or any(block < 16 or block & (block - 1) for block in blocks):
            raise ValueError(f"blocks must be six powers of two of at least 16, not {tuple(blocks)}")
        forward, dq, dkdv = PLAN(self.queries, self.keys, self.seqlen_k, list(blocks))
        return self._replace(plan=Plan(forward, dq, dkdv, tuple(blocks)))


# The tile sizes to plan for (mask, D, dtype, rich, softcap) are the kernels' to say, None where none run. The kernels
# know masks, and masks know no kernels: dispatch.py registers this.
PlanBlocks = Callable[[Mask, int, torch.dtype, bool, bool], tuple[int, ...] | None]
_plan_blocks: PlanBlocks | None = None


def register_plan_blocks(function: PlanBlocks) -> None:
    """Let `Mask.planned` ask this function for tile sizes (see Plan.blocks)."""
    global _plan_blocks
    _plan_blocks = function
