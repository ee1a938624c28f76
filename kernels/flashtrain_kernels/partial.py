"""Attention as two plain functions, forward and backward apart: for a caller that holds some of the keys at a time.

    out, lse = attention_forward(q, k_part, v_part, mask=part)             for each part of the keys
    merge_attention([...])                                                 -> out and lse over all keys
    dq, dk, dv = attention_backward(dout, q, k_part, v_part, out, lse, mask=part)

Given the merged out and lse, the backward over a part of the keys returns exactly that part's dk and dv, and the
part's share of dq: the shares add up (FlashAttention-2, arXiv 2307.08691, section 3.1: a query's row enters the
backward only through its log-sum-exp and the sum of dout * out). Context parallelism is made of this.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

import torch
from torch import Tensor

from .arguments import Sizes, check_device, check_qkv
from .calls import Given, options_of
from .masks import Mask
from .ops import BACKWARD, FORWARD
from .options import Packed, pack

_Q, _K = "(B, Sq, H, D)", "(B, Sk, K, D)"


@torch.no_grad()
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `flash_attn_func` with these arguments, without a gradient: see there for every argument.

    out (B, Sq, H, D) in q's dtype; lse (B, H, Sq), natural log, float32 (float64 for float64). Without mask and
    window: full.
    """
    return FORWARD(q, k, v, *_packed(q, k, v, mask, window_size, softmax_scale, dropout_p, dropout_seed))


@torch.no_grad()
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    mask: Mask | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) over the keys that are given, which may be a part of those that out and lse were made with.

    dout, out: (B, Sq, H, D); lse: (B, H, Sq), as `attention_forward` or `merge_attention` return them, over all keys.
    The other arguments as in the forward; with dropout the seed must be given, the same one.
    Returns gradients in the dtypes and shapes of q, k and v; dq is the given keys' share of it.
    Raises TypeError or ValueError naming the argument.
    """
    if dropout_p > 0 and dropout_seed is None:
        raise ValueError("dropout_seed must be the forward's own, not None")
    packed = _packed(q, k, v, mask, window_size, softmax_scale, dropout_p, dropout_seed)
    rows = (q.shape[0], q.shape[2], q.shape[1])
    for name, x, shape in (("dout", dout, q.shape), ("out", out, q.shape), ("lse", lse, rows)):
        if tuple(x.shape) != tuple(shape):
            raise ValueError(f"{name} must have the shape {tuple(shape)}, not {tuple(x.shape)}")
        check_device(name, x, q.device)
    dq, dk, dv, _ = BACKWARD(dout, None, q, k, v, out, lse, False, *packed)
    return dq, dk, dv


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    window_size: tuple[int, int],
    softmax_scale: float | None,
    dropout_p: float,
    dropout_seed: int | Tensor | None,
) -> Packed:
    check_qkv(q, k, v, _Q, _K)
    sizes = Sizes(
        q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], q.shape[0], q.dtype, q.device
    )  # fmt: skip
    given = Given(
        dropout_p=dropout_p, softmax_scale=softmax_scale, window_size=window_size, mask=mask, dropout_seed=dropout_seed
    )  # fmt: skip
    return pack(options_of(given, sizes))
