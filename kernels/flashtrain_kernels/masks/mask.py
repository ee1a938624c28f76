"""The Mask that kernels and the reference read: for each query, intervals of the key
positions that it sees.

B batch, Sq queries, Sk keys, N sequences; Bm is B, or 1 for a mask that every
row of the batch shares.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import INTEGERS, check_device, check_dtype
from .operators import packed_rows
from .plan import PLAN, Plan
from .rows import HIGH, HIGH2, LOW, LOW2, POSITION, START


class Sequences(NamedTuple):
    """The mask of N sequences packed into one row, given by their boundaries alone, for
    kernels that need no Mask.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int32, contiguous: 0, then where each
            sequence's queries and keys end.
        seqlen_q, seqlen_k: Sq and Sk of the row; tokens past the last end see
            nothing and are not seen.
        window: (left, right), -1 for no bound, aligned bottom-right within each sequence.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqlen_q: int
    seqlen_k: int
    window: tuple[int, int]

    @property
    def number(self) -> int:
        """Return N, the number of sequences."""
        return self.cu_seqlens_q.shape[0] - 1

    def mask(self) -> "Mask":
        """Make the equivalent Mask, with Bm = 1."""
        rows = packed_rows(
            self.cu_seqlens_q, self.cu_seqlens_k, self.seqlen_q, self.seqlen_k, *self.window
        )
        return Mask(rows, None, self.seqlen_k, sequences=self)


class Mask(NamedTuple):
    """Which keys each query sees: at most two intervals of key positions a query.

    Positions are absolute, so `select` can reorder queries and keys, or take a part of them. The
    functions of `flashtrain_kernels.masks` make the usual masks; any tensors of this form are a
    mask. A NamedTuple of tensors, so torch.compile and activation checkpointing accept it.

    Attributes:
        queries: (5 or 7, Bm, Sq) int32, contiguous; its rows, named in rows.py:
            LOW, HIGH    the query sees the keys whose position p has LOW <= p < HIGH,
            LOW2, HIGH2  and those with LOW2 <= p < HIGH2 (with 7 rows; the two
                         intervals may overlap)
            POSITION     the query's own position among the keys, for the distances of ALiBi
            START        the first key position of the query's sequence (document), from
                         which dropout counts
            SEQUENCE     the number of that sequence in the batch, for dropout and for
                         ALiBi slopes (N, H)
        keys: (Bm, Sk) int32, each key's position, below 2^30; None: key j is at position j.
        seqlen_k: Sk.
        plan: the tiles that kernels visit, from `planned`; None: each call makes it.
        band: (left, right), -1 for no bound, if the mask is only a window over one sequence, as
            `masks.causal` makes it; callers may then use the window instead. None: unknown.
        sequences: the packed sequences if the mask is only theirs, as `masks.varlen` makes it;
            kernels may use them instead.
    """

    queries: Tensor
    keys: Tensor | None
    seqlen_k: int
    plan: Plan | None = None
    band: tuple[int, int] | None = None
    sequences: Sequences | None = None

    def dense(self) -> Tensor:
        """Return (Bm, Sq, Sk) bool, True where a query sees a key: the whole matrix, for
        tests and small sizes."""
        if self.keys is None:
            position = torch.arange(self.seqlen_k, device=self.queries.device, dtype=torch.int32)[
                None, None, :
            ]
        else:
            position = self.keys[:, None, :]
        rows = self.queries[:, :, :, None]
        seen = (position >= rows[LOW]) & (position < rows[HIGH])
        if self.queries.shape[0] == 7:
            seen = seen | ((position >= rows[LOW2]) & (position < rows[HIGH2]))
        return seen

    def select(self, queries: Tensor, keys: Tensor) -> "Mask":
        """Return the mask of chosen queries and keys, in the order given (for context parallelism).

        Args:
            queries: (n,) integer indices below Sq, on the mask's device.
            keys: (m,) integer indices below Sk. Ranges are not checked, as this
                would wait for the device.

        Raises:
            TypeError, ValueError: an argument is not such a tensor.
        """
        for name, index in (("queries", queries), ("keys", keys)):
            check_dtype(name, index, "(n,)", INTEGERS)
            if index.dim() != 1:
                raise ValueError(
                    f"{name} must have one dimension, not the shape {tuple(index.shape)}"
                )
            check_device(name, index, self.queries.device, "mask.queries")
        if self.keys is None:
            positions = keys.to(torch.int32).expand(self.queries.shape[1], -1).contiguous()
        else:
            positions = self.keys.index_select(1, keys)
        return Mask(self.queries.index_select(2, queries), positions, keys.shape[0])

    def within(self, left: int, right: int = -1) -> "Mask":
        """Return this mask with further pairs hidden: those whose key is more than `left` positions
        before the query or more than `right` after it.

        Args:
            left, right: numbers of positions, -1 for no bound; a sliding window of w
                tokens is left = w - 1.
        """
        if left < 0 and right < 0:
            return self
        rows, own = self.queries.clone(), self.queries[POSITION]
        for low, high in ((LOW, HIGH), (LOW2, HIGH2))[: (rows.shape[0] - 3) // 2]:
            if left >= 0:
                rows[low] = torch.maximum(rows[low], own - left)
            if right >= 0:
                rows[high] = torch.minimum(rows[high], own + right + 1)
        band = self.band
        if band is not None:
            band = _closer(band[0], left), _closer(band[1], right)
        found, packed = Mask(rows, self.keys, self.seqlen_k, band=band), self.sequences
        if packed is None:
            return found
        window = (_closer(packed.window[0], left), _closer(packed.window[1], right))
        return found._replace(sequences=packed._replace(window=window))

    def chunked(self, size: int) -> "Mask":
        """Return this mask with further pairs hidden: those whose key is in an earlier chunk of
        `size` tokens of the query's document (a block-diagonal mask, if this one is causal)."""
        rows, own = self.queries.clone(), self.queries[POSITION]
        start = own - (own - rows[START]) % size
        for low in (LOW, LOW2)[: (rows.shape[0] - 3) // 2]:
            rows[low] = torch.maximum(rows[low], start)
        return Mask(rows, self.keys, self.seqlen_k)

    def planned(
        self, head_dim: int, dtype: torch.dtype, *, rich: bool = False, softcap: bool = False
    ) -> "Mask":
        """Return this mask with a plan of the tiles to visit, if kernels need one for this
        head dimension and dtype.

        Call it once a batch, for every layer: attention makes a missing plan at every
        call. Waits for nothing.

        Args:
            rich, softcap: whether the calls have ALiBi, a bias or dropout;
                whether they have a softcap.
        """
        blocks = (
            None if _plan_blocks is None else _plan_blocks(self, head_dim, dtype, rich, softcap)
        )
        return self if blocks is None else self.planned_for(blocks)

    def planned_for(self, blocks: tuple[int, ...]) -> "Mask":
        """Return this mask with a plan (the tiles with a visible pair) for six tile sizes,
        powers of 2: Plan.blocks."""
        if self.plan is not None and self.plan.blocks == tuple(blocks):
            return self
        if len(blocks) != 6 or any(block < 16 or block & (block - 1) for block in blocks):
            raise ValueError(
                f"blocks must be six powers of two of at least 16, not {tuple(blocks)}"
            )
        forward, dq, dkdv = PLAN(self.queries, self.keys, self.seqlen_k, list(blocks))
        return self._replace(plan=Plan(forward, dq, dkdv, tuple(blocks)))


def _closer(bound: int, other: int) -> int:
    """The narrower of two bounds of a window, where -1 is none."""
    return other if bound < 0 else bound if other < 0 else min(bound, other)


# The tile sizes to plan for (mask, D, dtype, rich, softcap) are the kernels' to say, None where
# none run. The kernels know masks, and masks know no kernels: dispatch.py registers this.
PlanBlocks = Callable[[Mask, int, torch.dtype, bool, bool], tuple[int, ...] | None]
_plan_blocks: PlanBlocks | None = None


def register_plan_blocks(function: PlanBlocks) -> None:
    """Set the function that `Mask.planned` calls to get the kernels' tile
    sizes (see Plan.blocks)."""
    global _plan_blocks
    _plan_blocks = function
