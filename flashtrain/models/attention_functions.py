"""The inner attention, softmax(q k^T scale) v, three ways under one signature: flash, sdpa, standard.

All three mean the same thing, to rounding:
- causal is aligned bottom-right: the last query sees every key, so a query block behind a key/value cache is right;
- a mask (flashtrain_kernels.masks, or a BlockMask) alone says which keys each query sees: it holds its own causal
  rule, and `causal` is not looked at;
- grouped-query attention: query head h reads key/value head h // (H // K);
- dropout is the probability that an attention weight is dropped; the kept ones are divided by 1 - dropout. Each draws
  from torch's generator in its own way, so what is dropped differs between the three;
- a query that sees no key gives zeros.

Shapes: B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
q (B, Sq, H, D); k and v (B, Sk, K, D); result (B, Sq, H, D). UserError: a mask of other sizes than q and k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtrain.errors import UserError, unknown
from flashtrain.models.block_rows import block_rows_attention, takes_block_rows
from flashtrain_kernels import BlockMask, Mask, dispatch, flash_attn_func, flash_attn_qkvpacked_func, masks

InnerAttention = Callable[..., Tensor]
AnyMask = Mask | BlockMask


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, mask: AnyMask | None = None, dropout: float = 0.0
) -> Tensor:
    """flashtrain_kernels' exact FlashAttention (Dao et al. 2022): memory linear in S."""
    check_mask(mask, q, k)
    out = flash_attn_func(q, k, v, dropout, softmax_scale=scale, causal=causal and mask is None, mask=mask)
    return cast(Tensor, out)  # without return_lse it is the output alone


def flash_packed_attention(
    qkv: Tensor, *, causal: bool, scale: float, mask: AnyMask | None = None, dropout: float = 0.0
) -> Tensor:
    """flash_attention of qkv (B, S, 3, H, D) as one projection wrote it: nothing is split or copied."""
    check_mask(mask, qkv, qkv)
    out = flash_attn_qkvpacked_func(qkv, dropout, softmax_scale=scale, causal=causal and mask is None, mask=mask)
    return cast(Tensor, out)


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, mask: AnyMask | None = None, dropout: float = 0.0
) -> Tensor:
    """torch's scaled_dot_product_attention, which picks its own kernel (an S x S mask is built only where needed)."""
    if takes_block_rows(q, k, v, mask):
        check_mask(mask, q, k)
        return block_rows_attention(q, k, v, scale=scale, mask=cast(BlockMask, mask), dropout=dropout)
    queries, keys = q.shape[1], k.shape[1]
    # torch aligns is_causal top-left, which is bottom-right only for as many queries as keys.
    plain_causal = causal and mask is None and queries == keys
    visible = None if plain_causal else visible_keys(q, k, causal, mask)
    blind = _blind_queries(visible, q, k, mask)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        # A query that sees nothing is let see everything, so that nothing becomes NaN, and its result is taken out.
        attn_mask=visible if visible is None or blind is None else visible | blind,
        dropout_p=dropout,
        is_causal=plain_causal and queries > 1,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return (out if blind is None else out.masked_fill(blind, 0.0)).transpose(1, 2)


def standard_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, mask: AnyMask | None = None, dropout: float = 0.0
) -> Tensor:
    """The paper's baseline (Dao et al. 2022, Algorithm 0): the Sq x Sk matrix is written out, softmaxed, multiplied."""
    visible = visible_keys(q, k, causal, mask)
    blind = _blind_queries(visible, q, k, mask)
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(-2, -1)) * scale
    if visible is not None:
        # The most negative number, not -inf: a row that is hidden throughout must not become NaN, here or in backward.
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    probabilities = F.dropout(torch.softmax(scores, dim=-1), dropout).to(v.dtype)
    out = probabilities @ v
    return (out if blind is None else out.masked_fill(blind, 0.0)).transpose(1, 2)


ATTENTION_FUNCTIONS: dict[str, InnerAttention] = {
    "flash": flash_attention,
    "sdpa": sdpa_attention,
    "standard": standard_attention,
}


def attention_function(name: str) -> InnerAttention:
    """The inner attention of that name. UserError: no such name."""
    if name not in ATTENTION_FUNCTIONS:
        raise unknown("attention", name, ATTENTION_FUNCTIONS)
    return ATTENTION_FUNCTIONS[name]


def plan_mask(
    mask: AnyMask | None, x: Tensor, *, attention: str, head_dim: int, dropout: float = 0.0
) -> AnyMask | None:
    """The mask with the plan that the kernels of every layer read, so that it is made once a batch and not in each.

    x: what the layers are given; attention computes in its dtype, or in autocast's. dropout: as the attention will be
    called with, 0 in evaluation. Only flash has plans, and only where our kernels run: elsewhere it is the mask itself.
    A BlockMask is its own plan.
    """
    if (
        mask is None
        or isinstance(mask, BlockMask)
        or attention != "flash"
        or dispatch.implementation_for(x.device.type) == "torch"
    ):
        return mask
    dtype = x.dtype
    # Autocast leaves float64 alone.
    if dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    return mask.planned(head_dim, dtype, rich=dropout > 0)


def visible_keys(q: Tensor, k: Tensor, causal: bool, mask: AnyMask | None) -> Tensor | None:
    """Which keys each query sees: bool, (B or 1, 1 or H, Sq, Sk); None where every query sees every key."""
    check_mask(mask, q, k)
    if mask is None:
        if not causal or q.shape[1] == 1:
            return None
        mask = masks.causal(q.shape[1], k.shape[1], device=q.device)
    return mask.dense() if isinstance(mask, BlockMask) else mask.dense()[:, None]


def check_mask(mask: AnyMask | None, q: Tensor, k: Tensor) -> None:
    """UserError for a mask that was not made for as many queries, keys and rows as there are."""
    if mask is None:
        return
    if isinstance(mask, BlockMask):
        rows, queries = mask.query_rows.shape[0], mask.seqlen_q
    else:
        rows, queries = mask.queries.shape[1], mask.queries.shape[2]
    if queries != q.shape[1] or mask.seqlen_k != k.shape[1] or (rows != 1 and rows != q.shape[0]):
        raise UserError(
            f"a mask of {queries} queries and {mask.seqlen_k} keys in {rows} rows for {q.shape[1]} queries and "
            f"{k.shape[1]} keys in {q.shape[0]}. Possible: a mask of the same sizes, or of one row for all."
        )


def _blind_queries(visible: Tensor | None, q: Tensor, k: Tensor, mask: AnyMask | None) -> Tensor | None:
    """The queries that see no key: bool, (B or 1, 1, Sq, 1); None where there cannot be any."""
    if visible is None or (mask is None and q.shape[1] <= k.shape[1]):
        return None
    return ~visible.any(-1, keepdim=True)
