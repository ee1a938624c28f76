"""The one description of a mask that the kernels and the reference read: intervals of key positions, one row a query.

B batch, Sq queries, Sk keys; Bm is B, or 1 for a mask that every row of the batch shares.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .plan import PLAN, Plan
from .rows import HIGH, HIGH2, LOW, LOW2


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

    Positions are absolute, so the same mask serves a sequence in any order and any part of one: `select`.
    A NamedTuple of tensors, so torch.compile and activation checkpointing pass it through. The functions of
    `flashtrain_kernels.masks` make the usual ones; anything of this form is a mask.
    """

    queries: Tensor
    keys: Tensor | None
    seqlen_k: int
    plan: Plan | None = None
    band: tuple[int, int] | None = None

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
        """The mask of some of the queries and keys, in the order given: dense() indexed in both, without a plan.

        queries: (n,) and keys: (m,) integer indices on the mask's device, within Sq and Sk (not checked: that would
        wait for the device). For context parallelism: a rank's own queries and the keys in the order it holds them.
        Raises TypeError or ValueError for anything that is no such tensor.
        """
        for name, index in (("queries", queries), ("keys", keys)):
            _check_indices(name, index, self.queries.device)
        if self.keys is None:
            positions = keys.to(torch.int32).expand(self.queries.shape[1], -1).contiguous()
        else:
            positions = self.keys.index_select(1, keys)
        return Mask(self.queries.index_select(2, queries), positions, keys.shape[0])

    def planned(self, head_dim: int, dtype: torch.dtype, *, rich: bool = False) -> "Mask":
        """This mask with the plan for attention of this head dimension and dtype; itself where nothing is to be done.

        Every kernel call needs a plan and makes one where it is missing: call this once a batch and give the result
        to every layer. Waits for nothing.
        """
        blocks = None if _plan_blocks is None else _plan_blocks(self, head_dim, dtype, rich)
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


# The tile sizes to plan for are the kernels' to say, None where none run. The kernels know masks, and masks know no
# kernels: dispatch.py registers this.
PlanBlocks = Callable[[Mask, int, torch.dtype, bool], tuple[int, ...] | None]
_plan_blocks: PlanBlocks | None = None


def register_plan_blocks(function: PlanBlocks) -> None:
    """Let `Mask.planned` ask this function for tile sizes (see Plan.blocks)."""
    global _plan_blocks
    _plan_blocks = function


def _check_indices(name: str, index: Tensor, device: torch.device) -> None:
    if not isinstance(index, Tensor):
        raise TypeError(f"{name} must be an integer tensor of indices, not {type(index).__name__}")
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64 indices, not {index.dtype}")
    if index.dim() != 1:
        raise ValueError(f"{name} must have one dimension, not the shape {tuple(index.shape)}")
    if index.device != device:
        raise ValueError(f"{name} are on {index.device} and the mask is on {device}: they must be on the same device")
