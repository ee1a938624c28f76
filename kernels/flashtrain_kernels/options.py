"""Everything of an attention call besides q, k and v, as one value: what the operators, the reference and the kernels share.

B batch, Sq queries, Sk keys, H query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .block_sparse import BlockMask
from .masks import Mask, Plan


@dataclass(frozen=True)
class Options:
    """The options of one call, checked already.

    scale: what q k^T is multiplied by. softcap: 0, or the bound c of c * tanh(score / c).
    left, right: the band of a call without a mask: query i sees key j when i + left <= j <= i + right; None: no bound.
    dropout_p: probability in [0, 1) of dropping an attention weight. seed: (3,) int64 on q's device, with dropout: the
    seed, and what is added to the sequence and head numbers that the random numbers are keyed by.
    bias: (B or 1, H or 1, Sq or 1, Sk or 1), added to the scores; -inf hides a pair.
    alibi_slopes: (H,) or (B, H) float32: slope * |p - j| is subtracted, p being the query's position among the keys.
    mask: a Mask (which holds its own bounds: left and right are None) or a BlockMask (with the band it was built for).
    """

    scale: float
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    seed: Tensor | None = None
    mask: Mask | BlockMask | None = None


def pack(options: Options) -> tuple:
    """The options as an operator's arguments: bias, slopes, seed, the mask's tensors, numbers, the mask's sizes."""
    tensors, sizes = _pack_mask(options.mask)
    return (
        options.bias, options.alibi_slopes, options.seed, tensors, options.scale, options.left, options.right,
        options.softcap, options.dropout_p, sizes,
    )  # fmt: skip


def unpack(packed: tuple) -> Options:
    """The inverse of `pack`."""
    bias, slopes, seed, tensors, scale, left, right, softcap, dropout_p, sizes = packed
    mask = _unpack_mask(tensors, sizes, left, right)
    return Options(scale, left, right, softcap, dropout_p, bias, slopes, seed, mask)


def _pack_mask(mask: Mask | BlockMask | None) -> tuple[list[Tensor], list[int]]:
    """A Mask is two tensors, or five with its plan, and Sk and the plan's blocks; a BlockMask is four, and its sizes."""
    if mask is None:
        return [], [0]  # not empty: torch takes an empty list for one of tensors
    if isinstance(mask, Mask):
        keys = mask.queries.new_empty((0,)) if mask.keys is None else mask.keys
        if mask.plan is None:
            return [mask.queries, keys], [mask.seqlen_k]
        plan = mask.plan
        return [mask.queries, keys, plan.forward, plan.dq, plan.dkdv], [mask.seqlen_k, *plan.blocks]
    lists = [mask.query_rows, mask.query_blocks, mask.key_rows, mask.key_blocks]
    return lists, [*mask.block_size, mask.seqlen_q, mask.seqlen_k]


def _unpack_mask(
    tensors: list[Tensor], sizes: list[int], left: int | None, right: int | None
) -> Mask | BlockMask | None:  # fmt: skip
    if not tensors:
        return None
    if len(tensors) == 4:
        rows, blocks, key_rows, key_blocks = tensors
        return BlockMask(rows, blocks, key_rows, key_blocks, (sizes[0], sizes[1]), sizes[2], sizes[3], left, right)
    keys = None if tensors[1].dim() == 1 else tensors[1]
    plan = None
    if len(tensors) == 5:
        plan = Plan(forward=tensors[2], dq=tensors[3], dkdv=tensors[4], blocks=tuple(sizes[1:]))
    return Mask(tensors[0], keys, sizes[0], plan)
