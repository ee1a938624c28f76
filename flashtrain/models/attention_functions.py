"""The inner attention, softmax(q k^T scale) v, three ways under one signature: flash, sdpa, standard.

All three mean the same thing, to rounding:
- causal is aligned bottom-right: the last query sees every key, so a query block behind a key/value cache is right;
- with documents, a query sees only keys of its own document (needs Sq == Sk);
- grouped-query attention: query head h reads key/value head h // (H // K);
- a query that sees no key (only possible when causal and Sq > Sk) gives zeros.

Shapes: B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
q (B, Sq, H, D); k and v (B, Sk, K, D); result (B, Sq, H, D).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtrain.errors import UserError, unknown
from flashtrain_kernels import Documents, flash_attn_func

InnerAttention = Callable[..., Tensor]


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, documents: Documents | None, dropout: float = 0.0
) -> Tensor:
    """flashtrain_kernels' exact FlashAttention (Dao et al. 2022): memory linear in S. dropout must be 0; no float64."""
    # Without return_lse it is the output alone.
    return cast(Tensor, flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, documents=documents))


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, documents: Documents | None, dropout: float = 0.0
) -> Tensor:
    """torch's scaled_dot_product_attention, which picks its own kernel (an S x S mask is built only where needed)."""
    queries, keys = q.shape[1], k.shape[1]
    plain_causal = causal and documents is None and queries == keys
    # torch aligns is_causal top-left, and one query behind a cache sees every key: both differ from a plain triangle.
    needs_mask = documents is not None or (causal and queries not in (1, keys))
    mask = visible_keys(queries, keys, causal, documents, q.device) if needs_mask else None
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=plain_causal and queries > 1,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    if causal and queries > keys:
        out = out.masked_fill(_blind_queries(queries, keys, q.device), 0.0)
    return out.transpose(1, 2)


def standard_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, documents: Documents | None, dropout: float = 0.0
) -> Tensor:
    """The paper's baseline (Dao et al. 2022, Algorithm 0): the Sq x Sk matrix is written out, softmaxed, multiplied."""
    queries, keys = q.shape[1], k.shape[1]
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(-2, -1)) * scale
    if causal or documents is not None:
        hidden = ~visible_keys(queries, keys, causal, documents, q.device)
        # The most negative number, not -inf: a row that is hidden throughout must not become NaN, here or in backward.
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    probabilities = F.dropout(torch.softmax(scores, dim=-1), dropout).to(v.dtype)
    out = probabilities @ v
    if causal and queries > keys:
        out = out.masked_fill(_blind_queries(queries, keys, q.device), 0.0)
    return out.transpose(1, 2)


def visible_keys(
    queries: int, keys: int, causal: bool, documents: Documents | None, device: torch.device | str
) -> Tensor:
    """Which keys each query may see: bool, (Sq, Sk), or (B, 1, Sq, Sk) with documents."""
    key = torch.arange(keys, device=device)
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        visible = key <= torch.arange(queries, device=device)[:, None] + (keys - queries)
    if documents is not None:
        if queries != keys:
            raise UserError(
                f"{queries} queries and {keys} keys with documents. Possible: as many queries as keys, or no documents."
            )
        inside = (key >= documents.start[:, :, None]) & (key < documents.end[:, :, None])
        visible = (visible & inside)[:, None]
    return visible


def _blind_queries(queries: int, keys: int, device: torch.device) -> Tensor:
    """Queries before the first key under the bottom-right causal rule: bool, (Sq, 1)."""
    return (torch.arange(queries, device=device) < queries - keys)[:, None]


ATTENTION_FUNCTIONS: dict[str, InnerAttention] = {
    "flash": flash_attention,
    "sdpa": sdpa_attention,
    "standard": standard_attention,
}
WITH_DROPOUT = {"sdpa", "standard"}


def attention_function(name: str, dropout: float = 0.0) -> InnerAttention:
    """The inner attention of that name. UserError: no such name, or one that cannot drop probabilities as asked."""
    if name not in ATTENTION_FUNCTIONS:
        raise unknown("attention", name, ATTENTION_FUNCTIONS)
    if dropout > 0 and name not in WITH_DROPOUT:
        raise UserError(
            f"dropout {dropout:g} with attention={name}: this version's kernel has no dropout. "
            f"Possible: dropout 0, or attention={' or '.join(sorted(WITH_DROPOUT))}."
        )
    return ATTENTION_FUNCTIONS[name]
