"""The public functions: check the arguments, say plainly what is wrong, call the operator.

B batch, S sequence (Sq queries, Sk keys), H query heads, K key/value heads, D head dimension.
"""

import math

import torch

from . import dispatch, ops, torch_sdpa
from .masks import Documents

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    documents: Documents | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention without the score matrix: softmax(q k^T * softmax_scale + mask) v (FlashAttention, arXiv
    2205.14135).

    q: (B, Sq, H, D); k, v: (B, Sk, K, D) with H a multiple of K (query head h reads key head h // (H / K)), D from 1
    to 256;
    float16, bfloat16 or float32 (on CPU tensors also float64), all three alike. Any strides; only a last dimension
    that is not contiguous is copied.
    softmax_scale: positive; default 1 / sqrt(D).
    causal: aligned bottom-right, as flash-attn: query i sees key j when j <= i + Sk - Sq.
    documents: from `documents_from_ids`; a query sees the keys of its own document only. Needs Sq == Sk.
    return_lse: also return the natural-log row log-sum-exp (B, H, Sq) in float32; it is differentiable.

    Returns out (B, Sq, H, D) in q's dtype, or (out, lse). A query that sees no key gives output 0, log-sum-exp -inf.
    Raises TypeError or ValueError that names the argument, what it was and what it may be.
    """
    scale = _check(q, k, v, softmax_scale, causal, documents)
    if dispatch.implementation_for(q.device.type) == "torch":
        return torch_sdpa.attention(
            q, k, v, softmax_scale=scale, causal=causal, documents=documents, return_lse=return_lse
        )
    start, end = (None, None) if documents is None else documents
    out, lse = ops.FORWARD(q, k, v, start, end, scale, causal)
    return (out, lse) if return_lse else out


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    documents: Documents | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flash_attn_func` on qkv (B, S, 3, H, D), as one projection gives it; its gradient is one tensor of that
    shape."""
    if not isinstance(qkv, torch.Tensor):
        raise TypeError(f"qkv must be a tensor (B, S, 3, H, D), not {type(qkv).__name__}")
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv must have the shape (B, S, 3, H, D), not {tuple(qkv.shape)}")
    q, k, v = qkv.unbind(2)
    scale = _check(q, k, v, softmax_scale, causal, documents)
    if dispatch.implementation_for(qkv.device.type) == "torch":
        return torch_sdpa.attention(
            q, k, v, softmax_scale=scale, causal=causal, documents=documents, return_lse=return_lse
        )
    start, end = (None, None) if documents is None else documents
    out, lse = ops.FORWARD_PACKED(qkv, start, end, scale, causal)
    return (out, lse) if return_lse else out


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    documents: Documents | None = None,
) -> str:
    """One line: which implementation and which tiles this call gets, and why. Raises what the call itself would
    raise."""
    _check(q, k, v, softmax_scale, causal, documents)
    return dispatch.explain_choice(q.device, q.shape[3], q.dtype)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    documents: Documents | None,
) -> float:
    """Raise for what cannot be computed; return the softmax scale."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor (B, S, heads, D), not {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name} must have the four dimensions (B, S, heads, D), not the shape {tuple(x.shape)}")
        if x.dtype == torch.float64 and dispatch.implementation_for(x.device.type) == "portable":
            raise TypeError(
                f"{name} is float64, which the Triton kernels do not compute: use float16, bfloat16 or float32 "
                "(float64 runs on CPU tensors, by torch's attention)"
            )
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or, on the CPU, float64, not {_name(x.dtype)}")
        if x.dtype != q.dtype:
            raise TypeError(
                f"{name} has dtype {_name(x.dtype)} and q has {_name(q.dtype)}: they must be the same "
                "(under autocast, cast them before the call)"
            )
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}: they must be on the same device")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape, not {tuple(k.shape)} and {tuple(v.shape)}")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"q, k and v must have the same batch size, not {q.shape[0]} and {k.shape[0]}")
    heads, head_dim, kv_heads = q.shape[2], q.shape[3], k.shape[2]
    if k.shape[3] != head_dim:
        raise ValueError(f"q, k and v must have the same head dimension, not {head_dim} and {k.shape[3]}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"the head dimension must be from 1 to {MAX_HEAD_DIM}, not {head_dim}")
    if kv_heads < 1 or heads < 1 or heads % kv_heads != 0:
        raise ValueError(f"q's heads must be a multiple of k's heads, not {heads} and {kv_heads}")
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, not {causal!r}")
    if documents is not None:
        _check_documents(documents, q, k)
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        raise TypeError(f"softmax_scale must be a number or None, not {type(softmax_scale).__name__}")
    if not 0.0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale must be a positive finite number, not {softmax_scale}")
    return float(softmax_scale)


def _check_documents(documents: Documents, q: torch.Tensor, k: torch.Tensor) -> None:
    if not isinstance(documents, Documents):
        raise TypeError(f"documents must come from documents_from_ids, not be a {type(documents).__name__}")
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"documents need as many queries as keys, not {q.shape[1]} and {k.shape[1]}")
    for name, x in (("start", documents.start), ("end", documents.end)):
        if x.dtype != torch.int32:
            raise TypeError(f"documents.{name} must be int32, not {_name(x.dtype)}")
        if x.shape != q.shape[:2]:
            raise ValueError(
                f"documents.{name} must have the shape (B, S) = {tuple(q.shape[:2])}, not {tuple(x.shape)}"
            )
        if x.device != q.device:
            raise ValueError(f"documents.{name} is on {x.device} and q on {q.device}: they must be on the same device")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
