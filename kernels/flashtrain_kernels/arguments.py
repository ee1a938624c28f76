"""Checks of the tensors and plain values that the public functions are given: what is wrong, and what it may be.

B batch, S sequence (Sq queries, Sk keys), H query heads, K key/value heads, D head dimension, T packed tokens.
Nothing here reads a tensor's values, so nothing waits for a device.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import dispatch

MAX_HEAD_DIM = 256
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Sizes(NamedTuple):
    """What one call works on. sequences: B, or in a packed row the number of sequences."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    sequences: int
    dtype: torch.dtype
    device: torch.device


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_tensor(name: str, x: Any, layout: str, packed: int | None = None) -> None:
    """A floating tensor with as many dimensions as layout names, such as "(B, S, 3, H, D)".

    packed: how many tensors lie side by side in the dimension before the heads.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor {layout}, not {type(x).__name__}")
    if x.dim() != layout.count(",") + 1 or (packed is not None and x.shape[-3] != packed):
        raise ValueError(f"{name} must have the shape {layout}, not {tuple(x.shape)}")
    if x.dtype not in _DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or, on the CPU, float64, not {dtype_name(x.dtype)}")
    if x.dtype == torch.float64 and dispatch.implementation_for(x.device.type) == "portable":
        raise TypeError(
            f"{name} is float64, which the Triton kernels do not compute: use float16, bfloat16 or float32 "
            "(float64 runs on CPU tensors, by torch's attention)"
        )


def check_same(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """One dtype and one device."""
    if x.dtype != other.dtype:
        raise TypeError(
            f"{name} has dtype {dtype_name(x.dtype)} and {other_name} has {dtype_name(other.dtype)}: they must be the "
            "same (under autocast, cast them before the call)"
        )
    check_device(name, x, other.device, other_name)


def check_device(name: str, x: Tensor, device: torch.device, other_name: str = "q") -> None:
    if x.device != device:
        raise ValueError(f"{name} is on {x.device} and {other_name} on {device}: they must be on the same device")


def check_qkv(q: Any, k: Any, v: Any, q_layout: str, k_layout: str) -> None:
    """q, k and v apart, batched or packed."""
    check_tensor("q", q, q_layout)
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x, k_layout)
        check_same(name, x, "q", q)
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape, not {tuple(k.shape)} and {tuple(v.shape)}")
    _check_widths(q, k, "k")


def check_q_and_kv(q: Any, kv: Any, q_layout: str, kv_layout: str) -> None:
    """q, and k and v in one tensor."""
    check_tensor("q", q, q_layout)
    check_tensor("kv", kv, kv_layout, packed=2)
    check_same("kv", kv, "q", q)
    _check_widths(q, kv, "kv")


def check_packed(qkv: Any, layout: str) -> None:
    """q, k and v in one tensor."""
    check_tensor("qkv", qkv, layout, packed=3)
    _check_widths(qkv, qkv, "qkv")


def _check_widths(q: Tensor, k: Tensor, name: str) -> None:
    if q.dim() == 4 and q.shape[0] != k.shape[0]:
        raise ValueError(f"q and {name} must have the same batch size, not {q.shape[0]} and {k.shape[0]}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and {name} must have the same head dimension, not {q.shape[-1]} and {k.shape[-1]}")
    check_head_dim(q.shape[-1])
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads < 1 or heads < 1 or heads % kv_heads != 0:
        raise ValueError(f"q's heads must be a multiple of {name}'s heads, not {heads} and {kv_heads}")


def broadcasts(size: int, whole: int) -> bool:
    """May a dimension of this size stand for the whole? (Not `size in (1, whole)`, which torch.compile gets wrong.)"""
    return size == 1 or size == whole


def check_head_dim(head_dim: int) -> None:
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"the head dimension must be from 1 to {MAX_HEAD_DIM}, not {head_dim}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")


def check_length(name: str, value: Any) -> None:
    """A number of tokens: an integer, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        hint = " (a tensor's is x.item())" if isinstance(value, Tensor) else ""
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}{hint}")
    if value < 0:
        raise ValueError(f"{name} must be 0 or more, not {value}")


def check_number(name: str, value: Any, or_none: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number{or_none}, not {type(value).__name__}")


def softmax_scale_or_default(softmax_scale: Any, head_dim: int, name: str = "softmax_scale") -> float:
    """What the scores are multiplied by: 1 / sqrt(D) unless given."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    check_number(name, softmax_scale, " or None")
    if not 0.0 < softmax_scale < math.inf:
        raise ValueError(f"{name} must be a positive finite number, not {softmax_scale}")
    return float(softmax_scale)


def check_dropout(dropout_p: Any) -> None:
    check_number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be a probability from 0 to less than 1, not {dropout_p}")


def check_softcap(softcap: Any) -> None:
    check_number("softcap", softcap)
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap must be a positive finite number, or 0 for none, not {softcap}")
