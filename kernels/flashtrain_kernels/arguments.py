"""Checks of the tensors and options of an attention call, named and ordered as in flash_attn_func.

B batch, S sequence (Sq queries, Sk keys), H query heads, K key/value heads, D head dimension, T
packed tokens, N sequences.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import dispatch
from .checks import (
    FLOATING,
    INTEGERS,
    check_device,
    check_dtype,
    check_number,
    check_shape,
    dtype_name,
)
from .device_values import values_of
from .environment import autocast_dtype
from .forms import Form
from .masks import SEQUENCE, BlockMask, Mask
from .options import band

MAX_HEAD_DIM = 512
_PACKED = {"kv": 2, "qkv": 3}  # how many tensors lie side by side in the dimension before the heads
Window = Sequence[int | None] | Tensor  # two integers


class Sizes(NamedTuple):
    """The dimensions, dtype and device of one attention call."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    sequences: int  # B, or in a packed row the number of sequences
    dtype: torch.dtype
    device: torch.device


def sizes_of(form: Form, tensors: Sequence[Tensor], sequences: int | None = None) -> Sizes:
    """Return the Sizes of checked tensors in this form. sequences: the number of sequences that a
    packed row holds; None unless sequences are packed."""
    q, k = tensors[0], tensors[-1]
    if form.heads_first:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    rows = (1, q.shape[0], k.shape[0]) if form.row else (q.shape[0], q.shape[1], k.shape[1])
    sequences = rows[0] if sequences is None else sequences
    return Sizes(*rows, q.shape[-2], k.shape[-2], q.shape[-1], sequences, q.dtype, q.device)


def autocasted(*tensors: Any) -> tuple[Any, ...]:
    """Cast tensors to torch.autocast's dtype if it is on, except float64 ones, as torch does
    for its own attention."""
    return tuple(
        [
            x.to(autocast_dtype(x.device.type) or x.dtype)
            if isinstance(x, Tensor) and x.dtype in FLOATING[:3]
            else x
            for x in tensors
        ]
    )


def plain_window(window_size: Any) -> Any:
    """Return a pair of integers as a tuple, with -1 for None; return any other value
    unchanged, to be checked later."""
    if (
        isinstance(window_size, Tensor)
        and window_size.shape == (2,)
        and not window_size.is_floating_point()
    ):
        window_size = window_size.tolist()
    if not isinstance(window_size, (tuple, list)):
        return window_size
    return tuple([-1 if side is None else plain_integer(side) for side in window_size])


def plain_integer(value: Any) -> Any:
    """Return an integer of numpy or in a tensor as Python's; return any other value
    unchanged, to be checked later."""
    if isinstance(value, (int, float, torch.SymInt)) or not hasattr(value, "__index__"):
        return value
    if isinstance(value, Tensor) and (value.numel() != 1 or value.dtype not in INTEGERS):
        return value
    return operator.index(value)


def broadcasts(size: int, whole: int) -> bool:
    """Return whether `size` broadcasts to `whole`. (Not `size in (1, whole)`, which
    torch.compile gets wrong.)"""
    return size == 1 or size == whole


# --- the tensors ----------------------------------------------------------------------------------


def check_floating(name: str, x: Any, layout: str) -> None:
    """Raise TypeError unless x is a float16, bfloat16, float32 or, on the CPU without
    Triton's interpreter, float64 tensor. Messages call x `name` and give its shape as
    `layout`, such as "(B, S, H, D)"."""
    check_dtype(name, x, layout, FLOATING)
    if x.dtype == torch.float64 and dispatch.implementation_for(x.device.type) == "portable":
        raise TypeError(
            f"{name} is float64, which the Triton kernels do not compute: "
            "use float16, bfloat16 or float32 (float64 runs on CPU tensors, by torch's attention)"
        )


def check_tensor(name: str, x: Any, layout: str) -> None:
    """Raise unless x is a floating tensor of this layout, such as "(B, S, 3, H, D)". The name "qkv"
    requires size 3 in the dimension before the heads, "kv" size 2."""
    check_floating(name, x, layout)
    if x.dim() != layout.count(",") + 1 or (name in _PACKED and x.shape[-3] != _PACKED[name]):
        raise ValueError(f"{name} must have the shape {layout}, not {tuple(x.shape)}")


def check_same(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Raise TypeError or ValueError unless x has the dtype and device of the tensor `other`."""
    if x.dtype != other.dtype:
        raise TypeError(
            f"{name} has dtype {dtype_name(x.dtype)} and {other_name} has "
            f"{dtype_name(other.dtype)}: they must be the same (torch.autocast makes them so)"
        )
    check_device(name, x, other.device, other_name)


def check_tensors(form: Form, tensors: Sequence[Any]) -> None:
    """Raise TypeError or ValueError unless q, k and v, apart or packed, are valid
    tensors that fit each other."""
    names = [*form.layouts]
    for name, layout, x in zip(names, form.layouts.values(), tensors, strict=True):
        check_tensor(name, x, layout)
        if x is not tensors[0]:
            check_same(name, x, names[0], tensors[0])
    if len(tensors) == 3:
        check_values("k", tensors[1], "v", tensors[2])
    second = min(1, len(names) - 1)
    q, k = tensors[0], tensors[second]
    if form.heads_first:
        q, k = form.to_batch(q), form.to_batch(k)
    if q.dim() == 4 and q.shape[0] != k.shape[0]:
        raise ValueError(
            f"q and {names[second]} must have the same batch size, "
            f"not {q.shape[0]} and {k.shape[0]}"
        )
    check_heads(q, k, names[second])


def check_values(name_k: str, k: Tensor, name_v: str, v: Tensor) -> None:
    """Raise ValueError unless k and v have the same shape, but for a last dimension of v from 1 to
    k's. name_k, name_v: what messages call them."""
    if k.shape[:-1] != v.shape[:-1]:
        shapes = f"{tuple(k.shape)} and {tuple(v.shape)}"
        raise ValueError(
            f"{name_k} and {name_v} must have the same shape, "
            f"but for the head dimension, not {shapes}"
        )
    if k.shape[-1] and not 1 <= v.shape[-1] <= k.shape[-1]:
        raise ValueError(
            f"{name_v}'s head dimension must be from 1 to {name_k}'s {k.shape[-1]}, "
            f"not {v.shape[-1]}"
        )


def check_heads(q: Tensor, k: Tensor, name: str) -> None:
    """Raise ValueError unless q and k have the same head dimension, from 1 to MAX_HEAD_DIM, and q's
    heads are a multiple of k's. name: what messages call k."""
    head_dim, heads, kv_heads = q.shape[-1], q.shape[-2], k.shape[-2]
    if head_dim != k.shape[-1]:
        raise ValueError(
            f"q and {name} must have the same head dimension, not {head_dim} and {k.shape[-1]}"
        )
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"the head dimension must be from 1 to {MAX_HEAD_DIM}, not {head_dim}")
    if kv_heads < 1 or heads < 1 or heads % kv_heads != 0:
        raise ValueError(
            f"q's heads must be a multiple of {name}'s heads, not {heads} and {kv_heads}"
        )


# --- the options ----------------------------------------------------------------------------------


def softmax_scale_or_default(
    softmax_scale: Any, head_dim: int, name: str = "softmax_scale"
) -> float:
    """Return the factor of the scores: softmax_scale if it is given, checked to be
    positive, else 1 / sqrt(D)."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    check_number(name, softmax_scale, " or None")
    if not 0.0 < softmax_scale < math.inf:
        raise ValueError(f"{name} must be a positive finite number, not {softmax_scale}")
    return float(softmax_scale)


def check_dropout(dropout_p: Any) -> None:
    """Raise TypeError or ValueError unless dropout_p is a probability below 1."""
    check_number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be a probability from 0 to less than 1, not {dropout_p}")


def check_softcap(softcap: Any) -> None:
    """Raise TypeError or ValueError unless softcap is a finite number, 0 or more."""
    check_number("softcap", softcap)
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap must be a positive finite number, or 0 for none, not {softcap}")


def check_alibi(slopes: Any, sizes: Sizes, mask: Any) -> None:
    """Raise TypeError or ValueError unless slopes are None, (H,), or (sequences, H) with a
    row for each sequence."""
    if slopes is None:
        return
    check_dtype("alibi_slopes", slopes, "(H,) or (sequences, H)", (torch.float32,))
    check_device("alibi_slopes", slopes, sizes.device)
    heads, rows = sizes.heads, sizes.sequences
    fits = slopes.dim() in (1, 2) and slopes.shape[-1] == heads
    if fits and slopes.dim() == 2:
        fits = slopes.shape[0] == rows
        if isinstance(mask, Mask) and sizes.seqlen_q > 0:
            # The mask numbers its sequences itself; one without slopes would be
            # read past their end.
            found = values_of(mask.queries, lambda queries: queries[SEQUENCE].amax())
            if found is None:
                return
            rows = (int(found[0]) + 1) * (sizes.batch if mask.queries.shape[1] == 1 else 1)
            fits = slopes.shape[0] >= rows
    if not fits:
        raise ValueError(
            f"alibi_slopes must have the shape (H,) = ({heads},) or (sequences, H) = ({rows}, "
            f"{heads}), not {tuple(slopes.shape)}"
        )


def check_sink(sink: Any, sizes: Sizes) -> None:
    """Raise TypeError or ValueError unless sink (the argument learnable_sink) is None or
    a floating tensor (H,)."""
    if sink is not None:
        check_dtype("learnable_sink", sink, "(H,)", FLOATING)
        check_device("learnable_sink", sink, sizes.device)
        check_shape("learnable_sink", sink, (sizes.heads,), "(H,)")


def check_bias(bias: Any, sizes: Sizes) -> None:
    """Raise unless bias is None or has 1 to 4 dimensions that broadcast to (B, H, Sq, Sk),
    in q's dtype or float32."""
    if bias is None:
        return
    full = (sizes.batch, sizes.heads, sizes.seqlen_q, sizes.seqlen_k)
    check_dtype("bias", bias, "that broadcasts to (B, H, Sq, Sk)", (sizes.dtype, torch.float32))
    check_device("bias", bias, sizes.device)
    given = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if not 1 <= bias.dim() <= 4 or not all(map(broadcasts, given, full)):
        raise ValueError(
            f"bias must broadcast to (B, H, Sq, Sk) = {full}, "
            f"which the shape {tuple(bias.shape)} does not"
        )


def check_seed(seed: Any, device: torch.device) -> None:
    """Raise unless seed (dropout_seed) is None, an integer, or an int64 tensor of 1 or 3
    elements on q's device."""
    if isinstance(seed, Tensor):
        check_dtype("dropout_seed", seed, "of 1 or 3 elements", (torch.int64,))
        if seed.dim() > 1 or seed.numel() not in (1, 3):
            raise ValueError(
                "dropout_seed must have 1 element, or 3: (seed, first sequence, first head), "
                f"not the shape {tuple(seed.shape)}"
            )
        check_device("dropout_seed", seed, device)
    elif seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, (int, torch.SymInt)):
            raise TypeError(
                f"dropout_seed must be an integer or an int64 tensor, not {type(seed).__name__}"
            )
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"dropout_seed must fit 64 bits, signed, not {seed}")


def check_mask(mask: Any, sizes: Sizes, causal: bool, window_size: tuple[int, int]) -> None:
    """Raise TypeError or ValueError unless mask is None, a Mask given without causal and
    window_size, or a BlockMask made with the same causal and window_size as the call."""
    if mask is None:
        return
    if isinstance(mask, Mask):
        if causal or tuple(window_size) != (-1, -1):
            raise ValueError(
                "mask must hold causal and window_size itself: with a Mask leave causal=False and "
                f"window_size=(-1, -1), not {causal} and {tuple(window_size)}"
            )
        _check_intervals(mask, sizes)
    elif isinstance(mask, BlockMask):
        _check_blocks(mask, sizes, causal, window_size)
    else:
        raise TypeError(
            "mask must be a Mask (flashtrain_kernels.masks) or a BlockMask "
            f"(flashtrain_kernels.block_mask), not {type(mask).__name__}"
        )


def _check_intervals(mask: Mask, sizes: Sizes) -> None:
    parts = [("mask.queries", mask.queries, sizes.seqlen_q)]
    if mask.keys is not None:
        parts.append(("mask.keys", mask.keys, sizes.seqlen_k))
    for name, x, length in parts:
        check_dtype(name, x, "(..., S)", (torch.int32,))
        check_device(name, x, sizes.device)
        rows = 3 if name == "mask.queries" else 2
        if x.dim() != rows or x.shape[-1] != length or not broadcasts(x.shape[-2], sizes.batch):
            raise ValueError(
                f"{name} must have {length} tokens in {_choice(sizes.batch)} batch rows, "
                f"to fit q and k, not the shape {tuple(x.shape)}"
            )
    if mask.keys is not None and mask.keys.shape[0] != mask.queries.shape[1]:
        raise ValueError(
            "mask.keys (Bm, Sk) must have the Bm of mask.queries (5 or 7, Bm, Sq), "
            f"{mask.queries.shape[1]}, not {mask.keys.shape[0]}"
        )
    if mask.queries.shape[0] not in (5, 7):
        raise ValueError(
            "mask.queries must have the shape (5 or 7, Bm, Sq), as masks.Mask describes, not "
            f"{mask.queries.shape[0]} in its first dimension"
        )
    if mask.seqlen_k != sizes.seqlen_k:
        raise ValueError(f"mask must have k's {sizes.seqlen_k} keys, not {mask.seqlen_k}")


def _check_blocks(
    mask: BlockMask, sizes: Sizes, causal: bool, window_size: tuple[int, int]
) -> None:
    if (mask.seqlen_q, mask.seqlen_k) != (sizes.seqlen_q, sizes.seqlen_k):
        raise ValueError(
            f"mask must have {sizes.seqlen_q} queries and {sizes.seqlen_k} keys, as q and k have, "
            f"not {mask.seqlen_q} and {mask.seqlen_k}"
        )
    batch, heads = mask.query_rows.shape[:2]
    if not (broadcasts(batch, sizes.batch) and broadcasts(heads, sizes.heads)):
        raise ValueError(
            f"mask must have {_choice(sizes.batch)} batch rows and {_choice(sizes.heads)} heads, "
            f"to fit q, not {batch} and {heads}"
        )
    check_device("mask", mask.query_rows, sizes.device)
    wanted = band(sizes.seqlen_q, sizes.seqlen_k, causal, window_size)
    if (mask.left, mask.right) != wanted:
        raise ValueError(
            f"mask must be made with the call's causal and window_size (key - query within "
            f"{wanted}, None: no bound), not with those of {(mask.left, mask.right)}"
        )


def _choice(size: int) -> str:
    return "1" if size == 1 else f"1 or {size}"
