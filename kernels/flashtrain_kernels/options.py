"""All options of an attention call, besides q, k and v, as one value: operators,
reference and kernels share it.

B batch, Sq queries, Sk keys, H query heads, N packed sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .masks import AnyMask, BlockMask, Mask, Plan, Sequences


@dataclass(frozen=True)
class Options:
    """The checked options of one attention call: scale, window, softcap, dropout,
    bias, ALiBi slopes, mask."""

    scale: float  # what q k^T is multiplied by
    # The band: query i sees key j when i + left <= j <= i + right; None: no bound.
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0  # 0, or the bound c of c * tanh(score / c)
    dropout_p: float = 0.0  # probability in [0, 1) of dropping an attention weight
    # (B or 1, H or 1, Sq or 1, Sk or 1), added to the scores; -inf hides a pair.
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None  # (H,) or (B, H) float32
    # With dropout, (3,) int64 on q's device: the seed, and what is added to the
    # sequence and head numbers.
    seed: Tensor | None = None
    # A Mask holds its own bounds: left and right are None. A BlockMask comes with the band
    # that it was built for. Of Sequences the window is left and right, counted from each
    # sequence's diagonal.
    mask: AnyMask | None = None
    # Requested; torch.use_deterministic_algorithms counts too (hopper/backward.py).
    deterministic: bool = False

    @property
    def rich(self) -> bool:
        """Whether softcap, ALiBi, a bias or dropout change the scores or weights.
        See tile_table.VARIANTS."""
        return self.softcap > 0 or self.beyond_softcap

    @property
    def beyond_softcap(self) -> bool:
        """Whether the call has ALiBi, a bias or dropout. The Hopper kernels
        support few such calls."""
        return self.bias is not None or self.alibi_slopes is not None or self.dropout_p > 0

    def by_boundaries(self, sequences: Sequences) -> Options:
        """Return these options with the packed sequences' boundaries in place of
        a Mask made from them."""
        left, right = sequences.window
        return replace(
            self,
            mask=sequences,
            left=-left if left >= 0 else None,
            right=right if right >= 0 else None,
        )

    def with_mask(self) -> Options:
        """Return these options with a Mask made from packed Sequences; the same options if
        they have no Sequences."""
        if not isinstance(self.mask, Sequences):
            return self
        return replace(self, mask=self.mask.mask()._replace(sequences=None), left=None, right=None)


# --- from flash-attn's arguments: causal and window as a band, a dropout seed as a tensor ---------


def band(
    seqlen_q: int, seqlen_k: int, causal: bool, window_size: tuple[int, int] = (-1, -1)
) -> tuple[int | None, int | None]:
    """Return (left, right) such that query i sees key j when i + left <= j <= i +
    right; None is no bound.

    As in flash-attn, aligned bottom-right: query i stands at key position i + Sk - Sq, and sees
    window_size[0] keys before it, itself, and window_size[1] after it; -1 is no bound; causal is a
    window that ends at 0.
    """
    shift = seqlen_k - seqlen_q
    left = None if window_size[0] < 0 else shift - window_size[0]
    right = None if window_size[1] < 0 else shift + window_size[1]
    return left, shift if causal else right


def seed_tensor(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """Return dropout's seed as (3,) int64 on the device: the seed, then the numbers of the first
    sequence and of the first head. Both are 0, unless `seed` already holds all three, as for a
    rank that has a part of the heads.

    For None a seed is drawn from torch's generator on the device, which needs no wait.
    Activation checkpointing restores the generator, so recomputation draws the same seed.
    """
    if seed is None:
        seed = torch.randint(0, 2**63 - 1, (1,), device=device, dtype=torch.int64)
    elif not isinstance(seed, Tensor):
        seed = torch.full((1,), seed, device=device, dtype=torch.int64)
    return (
        seed.reshape(3) if seed.numel() == 3 else torch.nn.functional.pad(seed.reshape(1), (0, 2))
    )


# --- as an operator's arguments -------------------------------------------------------------------


class Packed(NamedTuple):
    """The options as the operators' arguments, in order: tensors and numbers, as
    torch.library accepts no Mask."""

    bias: Tensor | None
    alibi_slopes: Tensor | None
    seed: Tensor | None
    mask_queries: Tensor | None  # of a Mask
    mask_keys: Tensor | None
    forward_table: Tensor | None  # of its plan; of a BlockMask query_rows
    dq_table: Tensor | None
    dkdv_table: Tensor | None  # of a BlockMask key_rows
    query_blocks: Tensor | None  # of a BlockMask
    key_blocks: Tensor | None
    cu_seqlens_q: Tensor | None  # of Sequences
    cu_seqlens_k: Tensor | None
    scale: float
    left: int | None
    right: int | None
    softcap: float
    dropout_p: float
    deterministic: bool
    # A Mask's Sk and plan's blocks; a BlockMask's block (two), Sq and Sk; Sequences' Sq and Sk.
    mask_sizes: list[int]


# The operators' schema of the above, and how many of its members are tensors.
TENSORS = 12
SCHEMA = (
    ", ".join(f"Tensor? {name}" for name in Packed._fields[:TENSORS])
    + (
        ", float scale, SymInt? left, SymInt? right, float softcap, float dropout_p, "
        "bool deterministic"
    )
    + ", SymInt[] mask_sizes"
)


def pack(options: Options) -> Packed:
    """Convert Options to the arguments of the torch.library operators, which are
    tensors and numbers only."""
    mask = options.mask
    packed = Packed(
        options.bias, options.alibi_slopes, options.seed, None, None, None, None, None, None, None,
        None, None,
        options.scale, options.left, options.right, options.softcap, options.dropout_p,
        options.deterministic, [],
    )  # fmt: skip
    if isinstance(mask, Mask):
        packed = packed._replace(
            mask_queries=mask.queries, mask_keys=mask.keys, mask_sizes=[mask.seqlen_k]
        )
        if mask.plan is None:
            return packed
        forward, dq, dkdv, blocks = mask.plan
        return packed._replace(
            forward_table=forward, dq_table=dq, dkdv_table=dkdv, mask_sizes=[mask.seqlen_k, *blocks]
        )  # fmt: skip
    if isinstance(mask, Sequences):
        sizes = [mask.seqlen_q, mask.seqlen_k]
        return packed._replace(
            cu_seqlens_q=mask.cu_seqlens_q, cu_seqlens_k=mask.cu_seqlens_k, mask_sizes=sizes
        )
    if mask is not None:
        return packed._replace(
            forward_table=mask.query_rows,
            dkdv_table=mask.key_rows,
            query_blocks=mask.query_blocks,
            key_blocks=mask.key_blocks,
            mask_sizes=[*mask.block_size, mask.seqlen_q, mask.seqlen_k],
        )
    return packed


def unpack(packed: Sequence[Any]) -> Options:
    """Convert the operators' arguments back to Options: the inverse of `pack`."""
    p = Packed(*packed)
    return Options(
        p.scale,
        p.left,
        p.right,
        p.softcap,
        p.dropout_p,
        p.bias,
        p.alibi_slopes,
        p.seed,
        _mask(p),
        p.deterministic,
    )


def _mask(p: Packed) -> AnyMask | None:
    sizes, forward, dkdv = p.mask_sizes, p.forward_table, p.dkdv_table
    if p.cu_seqlens_q is not None and p.cu_seqlens_k is not None:
        window = (-1 if p.left is None else -p.left, -1 if p.right is None else p.right)
        return Sequences(p.cu_seqlens_q, p.cu_seqlens_k, sizes[0], sizes[1], window)
    if p.mask_queries is not None:
        plan = None
        if forward is not None and p.dq_table is not None and dkdv is not None:
            plan = Plan(forward, p.dq_table, dkdv, tuple(sizes[1:]))
        return Mask(p.mask_queries, p.mask_keys, sizes[0], plan)
    if (
        forward is not None
        and p.query_blocks is not None
        and dkdv is not None
        and p.key_blocks is not None
    ):
        lists = (forward, p.query_blocks, dkdv, p.key_blocks)
        return BlockMask(*lists, (sizes[0], sizes[1]), sizes[2], sizes[3], p.left, p.right)
    return None
