"""torch's scaled_dot_product_attention computed by these kernels: the same
signature, layout and meaning.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D and Dv head dimensions of
queries and of values.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .arguments import (
    MAX_HEAD_DIM,
    autocasted,
    broadcasts,
    check_dropout,
    check_floating,
    check_same,
    softmax_scale_or_default,
)
from .attend import CHECKED, key_of, remember, run
from .checks import check_device, check_dtype, check_flag
from .eager import computed
from .forms import HEADS_FIRST
from .launch_cache import signature
from .options import Options, seed_tensor


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute softmax(query key^T * scale + attn_mask) value, like
    torch.nn.functional.scaled_dot_product_attention.

    Args:
        query: (..., H, Sq, D). Tensors of two or three dimensions have no head
            dimension: (..., Sq, D).
        key: (..., K, Sk, D).
        value: (..., K, Sk, Dv). Leading dimensions broadcast. One dtype for all: float16,
            bfloat16 or float32 (on the CPU also float64), or what torch.autocast casts to. D
            and Dv are at most 256.
        attn_mask: broadcasts to (..., H, Sq, Sk): bool, True where a query sees a key; or query's
            dtype or float32, added to the scores (differentiable). Not together with is_causal.
        dropout_p: probability in [0, 1) of dropping a weight, applied whenever above 0. The
            seed comes from torch's generator; the dropped weights differ from those of
            torch's own attention.
        is_causal: aligned top-left: query i sees the keys 0 to i
            (flash_attn_func aligns bottom-right).
        scale: positive; default 1 / sqrt(D).
        enable_gqa: allow H to be a multiple of K; query head h reads key head h // (H / K).

    Returns:
        (..., H, Sq, Dv) in query's dtype. A query that sees no key has output 0.

    Raises:
        TypeError, ValueError: the message names the argument, its value and what is expected.
    """
    checked = None
    if attn_mask is None:
        checked = key_of("sdpa", (query, key, value), (dropout_p, is_causal, scale, enable_gqa))
        call = None if checked is None else CHECKED.get(checked)
        if checked is not None and call is not None:
            given = [query, key, value]
            if dropout_p > 0:  # a call's seed is its own
                given.append(seed_tensor(None, query.device))
            return computed(call, given, signature(given) if dropout_p > 0 else checked[1], False)[
                0
            ].transpose(1, 2)
    query, key, value = autocasted(query, key, value)
    _check_tensors(query, key, value)
    check_dropout(dropout_p)
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    if is_causal and attn_mask is not None:
        raise ValueError(
            "attn_mask must be None with is_causal=True, as in torch: "
            "put the causal rule into attn_mask"
        )
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    leading = _leading(query, key, value)
    heads = _heads(query, key, value, enable_gqa)
    options = Options(
        scale=softmax_scale_or_default(scale, head_dim, "scale"),
        right=0 if is_causal else None,
        dropout_p=float(dropout_p),
        bias=None if attn_mask is None else _bias(attn_mask, query, key, leading, heads),
        seed=seed_tensor(None, query.device) if dropout_p > 0 else None,
    )
    if (
        query.dim() == 4
        and query.shape[1] == heads
        and value_dim <= head_dim
        and len(query) == len(key) == len(value)
    ):
        remember(checked, (query, key, value), options, form=HEADS_FIRST)
        out, _ = run((query, key, value), options, False, form=HEADS_FIRST)
        return out.transpose(1, 2)
    q = _batched(query, leading, heads)
    k = _batched(key, leading, key.shape[-3] if key.dim() > 3 else 1)
    v = _batched(value, leading, value.shape[-3] if value.dim() > 3 else 1)
    if value_dim > head_dim:
        q, k = (functional.pad(x, (0, value_dim - head_dim)) for x in (q, k))
    out, _ = run((q, k, v), options, False)
    out = out.transpose(1, 2)
    return out.reshape(*leading, *((heads,) if query.dim() > 3 else ()), *out.shape[2:])


def _check_tensors(query: Any, key: Any, value: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_floating(name, x, "(..., H, S, D)")
        if x.dim() < 2 or x.dim() != query.dim():
            raise ValueError(
                f"{name} must have 2 dimensions or more, and as many as query, "
                f"not the shape {tuple(x.shape)}"
            )
        check_same(name, x, "query", query)
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name}'s head dimension must be from 1 to {MAX_HEAD_DIM}, not {x.shape[-1]}"
            )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            "query and key must have the same head dimension, "
            f"not {query.shape[-1]} and {key.shape[-1]}"
        )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"key and value must have the same length, not {key.shape[-2]} and {value.shape[-2]}"
        )


def _leading(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Return the dimensions before the heads, broadcast over query, key and value."""
    past = -3 if query.dim() > 3 else -2
    shapes = [tuple(x.shape[:past]) for x in (query, key, value)]
    result = []
    for sizes in zip(*shapes, strict=True):
        others = [size for size in sizes if size != 1]
        if any(size != others[0] for size in others):
            raise ValueError(
                f"query, key and value must have leading dimensions that broadcast, not {shapes}"
            )
        result.append(others[0] if others else 1)
    return tuple(result)


def _heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> int:
    """Return H, the number of query heads after broadcasting, 1 without a head dimension. Raises
    ValueError unless the heads of key and value fit."""
    if query.dim() <= 3:
        return 1
    heads, key_heads, value_heads = query.shape[-3], key.shape[-3], value.shape[-3]
    if key_heads != value_heads:
        raise ValueError(
            f"key and value must have the same number of heads, not {key_heads} and {value_heads}"
        )
    if heads == key_heads or (enable_gqa and key_heads > 0 and heads % key_heads == 0):
        return heads
    if key_heads == 1:  # broadcasting, which is multi-query attention
        return heads
    if heads == 1:
        return key_heads
    what = (
        "a multiple of" if enable_gqa else "the same as (or, with enable_gqa=True, a multiple of)"
    )
    raise ValueError(f"query's heads must be {what} key's, not {heads} and {key_heads}")


def _batched(x: Tensor, leading: tuple[int, ...], heads: int) -> Tensor:
    """(..., heads, S, D) -> (B, S, heads, D), without a copy where the strides allow it."""
    x = x if x.dim() > 3 else x[..., None, :, :]
    x = x.expand(*leading, heads, *x.shape[-2:])
    return x.reshape(math.prod(leading), *x.shape[-3:]).transpose(1, 2)


def _bias(
    attn_mask: Any, query: Tensor, key: Tensor, leading: tuple[int, ...], heads: int
) -> Tensor:
    """Return attn_mask as a bias (B or 1, H or 1, Sq or 1, Sk or 1), B the product of the leading
    dimensions; heads, queries and keys that it broadcasts over stay 1."""
    if isinstance(attn_mask, Tensor) and attn_mask.dtype == torch.float16:
        (attn_mask,) = autocasted(attn_mask)
    check_dtype(
        "attn_mask", attn_mask, "(..., H, Sq, Sk)", (torch.bool, query.dtype, torch.float32)
    )
    check_device("attn_mask", attn_mask, query.device, "query")
    whole = (*leading, *((heads,) if query.dim() > 3 else ()), query.shape[-2], key.shape[-2])
    given = (1,) * (len(whole) - attn_mask.dim()) + tuple(attn_mask.shape)
    if len(given) != len(whole) or not all(map(broadcasts, given, whole)):
        raise ValueError(
            f"attn_mask must broadcast to {whole}, which the shape "
            f"{tuple(attn_mask.shape)} does not"
        )
    if attn_mask.dtype == torch.bool:
        bias = torch.zeros(given, dtype=query.dtype, device=query.device)
        bias = bias.masked_fill(~attn_mask.reshape(given), -torch.inf)
    else:
        bias = attn_mask.reshape(given)
    if query.dim() <= 3:
        bias = bias[..., None, :, :]
    before = bias.shape[:-3]
    if all(size == 1 for size in before):
        return bias.reshape(1, *bias.shape[-3:])
    return bias.expand(*leading, *bias.shape[-3:]).reshape(math.prod(leading), *bias.shape[-3:])
