"""Checks of the tensors and plain values that the public functions are given: what is wrong, and what it may be.

B batch, S sequence (Sq queries, Sk keys), H query heads, K key/value heads, D head dimension, T packed tokens,
N sequences.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import dispatch
from .device_values import values_of
from .environment import autocast_dtype
from .forms import Form
from .masks import SEQUENCE, BlockMask, Mask
from .masks.constructors import check_length
from .options import band

MAX_HEAD_DIM = 256
_PACKED = {"kv": 2, "qkv": 3}  # how many tensors lie side by side in the dimension before the heads
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


Window = Sequence[int | None] | Tensor  # two integers


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


def autocasted(*tensors: Any) -> tuple[Any, ...]:
    """The tensors as torch's own attention takes them: under torch.autocast in its dtype, float64 as it is."""
    return tuple([_autocasted(x) for x in tensors])


def _autocasted(x: Any) -> Any:
    if not isinstance(x, Tensor) or x.dtype not in _DTYPES[:3]:
        return x
    return x.to(autocast_dtype(x.device.type) or x.dtype)


def plain_window(window_size: Any) -> Any:
    """A pair of integers in whatever form as a tuple of them, None as -1. Other things stay, for the check."""
    if isinstance(window_size, Tensor) and window_size.shape == (2,) and not window_size.is_floating_point():
        window_size = window_size.tolist()
    if not isinstance(window_size, (tuple, list)):
        return window_size
    return tuple([-1 if side is None else plain_integer(side) for side in window_size])


def plain_integer(value: Any) -> Any:
    """numpy's integers, and a tensor's, as Python's."""
    if isinstance(value, (int, float, torch.SymInt)) or not hasattr(value, "__index__"):
        return value
    if isinstance(value, Tensor) and (value.numel() != 1 or value.dtype not in (torch.int32, torch.int64)):
        return value
    return operator.index(value)


class Packing(NamedTuple):
    """The sequences of a packed row."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | Tensor
    max_seqlen_k: int | Tensor


def sizes_of(form: Form, tensors: Sequence[Tensor], packing: Packing | None = None) -> Sizes:
    """Of tensors that are checked."""
    q, k = tensors[0], tensors[-1]
    if form.heads_first:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    rows = (1, q.shape[0], k.shape[0]) if form.row else (q.shape[0], q.shape[1], k.shape[1])
    sequences = rows[0] if packing is None else packing.cu_seqlens_q.shape[0] - 1
    return Sizes(*rows, q.shape[-2], k.shape[-2], q.shape[-1], sequences, q.dtype, q.device)


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
            "same (torch.autocast makes them so)"
        )
    check_device(name, x, other.device, other_name)


def check_device(name: str, x: Tensor, device: torch.device, other_name: str = "q") -> None:
    if x.device != device:
        raise ValueError(f"{name} is on {x.device} and {other_name} on {device}: they must be on the same device")


def check_tensors(form: Form, tensors: Sequence[Any]) -> None:
    """q, k and v as a public function takes them, apart or packed."""
    names = [*form.layouts]
    for name, layout, x in zip(names, form.layouts.values(), tensors, strict=True):
        check_tensor(name, x, layout, packed=_PACKED.get(name))
        if x is not tensors[0]:
            check_same(name, x, names[0], tensors[0])
    if len(tensors) == 3 and tensors[1].shape != tensors[2].shape:
        shapes = f"{tuple(tensors[1].shape)} and {tuple(tensors[2].shape)}"
        raise ValueError(f"k and v must have the same shape, not {shapes}")
    second = min(1, len(names) - 1)
    q, k = tensors[0], tensors[second]
    if form.heads_first:
        q, k = form.to_batch(q), form.to_batch(k)
    _check_widths(q, k, names[second])


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


def check_alibi(slopes: Any, sizes: Sizes, mask: Any) -> None:
    """alibi_slopes: (H,), or a row of H for each sequence."""
    if slopes is None:
        return
    heads, rows = sizes.heads, sizes.sequences
    if not isinstance(slopes, Tensor):
        raise TypeError(f"alibi_slopes must be a tensor (H,) or (sequences, H), not {type(slopes).__name__}")
    if slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes must be float32, not {dtype_name(slopes.dtype)}")
    check_device("alibi_slopes", slopes, sizes.device)
    if slopes.dim() not in (1, 2) or slopes.shape[-1] != heads:
        raise ValueError(
            f"alibi_slopes must have the shape (H,) = ({heads},) or (sequences, H), not {tuple(slopes.shape)}"
        )
    if slopes.dim() == 1:
        return
    if isinstance(mask, Mask) and sizes.seqlen_q > 0:
        # The mask numbers its sequences itself; one without slopes would be read past their end.
        found = values_of(mask.queries, lambda queries: queries[SEQUENCE].amax())
        if found is not None:
            shared = sizes.batch if mask.queries.shape[1] == 1 else 1
            rows = (int(found[0]) + 1) * shared
        if found is None or slopes.shape[0] >= rows:
            return
    if slopes.shape[0] != rows:
        raise ValueError(
            f"alibi_slopes must have the shape (H,) = ({heads},) or (sequences, H) = ({rows}, {heads}), "
            f"not {tuple(slopes.shape)}"
        )


def check_sink(sink: Any, sizes: Sizes) -> None:
    """learnable_sink: (H,), floating."""
    if sink is None:
        return
    if not isinstance(sink, Tensor):
        raise TypeError(f"learnable_sink must be a tensor (H,), not {type(sink).__name__}")
    if sink.dtype not in _DTYPES:
        raise TypeError(f"learnable_sink must be float16, bfloat16 or float32, not {dtype_name(sink.dtype)}")
    check_device("learnable_sink", sink, sizes.device)
    if tuple(sink.shape) != (sizes.heads,):
        raise ValueError(f"learnable_sink must have the shape (H,) = ({sizes.heads},), not {tuple(sink.shape)}")


def check_bias(bias: Any, sizes: Sizes) -> None:
    """bias: 1 to 4 dimensions that broadcast to (B, H, Sq, Sk), in q's dtype or float32."""
    if bias is None:
        return
    full = (sizes.batch, sizes.heads, sizes.seqlen_q, sizes.seqlen_k)
    if not isinstance(bias, Tensor):
        raise TypeError(f"bias must be a tensor that broadcasts to (B, H, Sq, Sk), not {type(bias).__name__}")
    if bias.dtype not in (sizes.dtype, torch.float32):
        wanted = dict.fromkeys([dtype_name(sizes.dtype), "float32"])
        raise TypeError(f"bias must be {' or '.join(wanted)}, not {dtype_name(bias.dtype)}")
    check_device("bias", bias, sizes.device)
    given = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if not 1 <= bias.dim() <= 4 or not all(map(broadcasts, given, full)):
        raise ValueError(
            f"bias must broadcast to (B, H, Sq, Sk) = {full}, which the shape {tuple(bias.shape)} does not"
        )


def check_seed(seed: Any, device: torch.device) -> None:
    """dropout_seed: None, a Python integer, or an int64 tensor of 1 or 3 elements on q's device."""
    if seed is None:
        return
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64:
            raise TypeError(f"dropout_seed must be an int64 tensor or an integer, not {dtype_name(seed.dtype)}")
        if seed.dim() > 1 or seed.numel() not in (1, 3):
            raise ValueError(f"dropout_seed must have 1 element, or 3 with offsets, not the shape {tuple(seed.shape)}")
        check_device("dropout_seed", seed, device)
        return
    if isinstance(seed, bool) or not isinstance(seed, (int, torch.SymInt)):
        raise TypeError(f"dropout_seed must be an integer or an int64 tensor, not {type(seed).__name__}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"dropout_seed must fit 64 bits, signed, not {seed}")


def check_mask(mask: Any, sizes: Sizes, causal: bool, window_size: tuple[int, int]) -> None:
    """mask: a Mask without causal and window_size, or a BlockMask made with the same ones."""
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
            "mask must be a Mask (flashtrain_kernels.masks) or a BlockMask (flashtrain_kernels.block_mask), "
            f"not {type(mask).__name__}"
        )


def check_packing(packing: Packing, tensors: Sequence[Tensor], tokens_k: int | None = None) -> None:
    """The boundaries of a packed row. tokens_k: how many keys there are, where no tensor's length says so."""
    cu_q, cu_k, longest_q, longest_k = packing
    tokens_q, device = tensors[0].shape[0], tensors[0].device
    if len(tensors) == 1:
        return _check_cu_seqlens("cu_seqlens", cu_q, tokens_q, device, "max_seqlen", longest_q)
    _check_cu_seqlens("cu_seqlens_q", cu_q, tokens_q, device, "max_seqlen_q", longest_q)
    tokens_k = tensors[-1].shape[0] if tokens_k is None else tokens_k
    _check_cu_seqlens("cu_seqlens_k", cu_k, tokens_k, device, "max_seqlen_k", longest_k)
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must be of as many sequences, "
            f"not of {cu_q.shape[0] - 1} and {cu_k.shape[0] - 1}"
        )


def check_boundaries(packing: Packing, tensors: Sequence[Tensor]) -> None:
    """What a packed row's boundaries hold: all that is left to check where tensors like them were right."""
    cu_q, cu_k, longest_q, longest_k = packing
    if len(tensors) == 1:
        return _check_ends("cu_seqlens", cu_q, tensors[0].shape[0], "max_seqlen", longest_q)
    tokens_q, tokens_k = tensors[0].shape[0], tensors[-1].shape[0]
    _check_ends("cu_seqlens_q", cu_q, tokens_q, "max_seqlen_q", longest_q)
    if cu_k is not cu_q or longest_k is not longest_q or tokens_k != tokens_q:
        _check_ends("cu_seqlens_k", cu_k, tokens_k, "max_seqlen_k", longest_k)


def _check_cu_seqlens(
    name: str, cu_seqlens: Any, total: int, device: torch.device, longest_name: str, longest: Any
) -> None:
    """cu_seqlens (N + 1,) int32: 0, then where each sequence ends; longest: the longest one's length, or more.

    The values are checked where they can be read without harm: always on the CPU; on a GPU once for each tensor, and
    not while torch.compile traces or a CUDA graph is captured.
    """
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{name} must be an int32 tensor (N + 1,), not {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, not {dtype_name(cu_seqlens.dtype)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"{name} must have the shape (N + 1,) for N sequences, not {tuple(cu_seqlens.shape)}")
    check_device(name, cu_seqlens, device)
    _check_ends(name, cu_seqlens, total, longest_name, longest)


def _check_ends(name: str, cu_seqlens: Tensor, total: int, longest_name: str, longest: Any) -> None:
    """The part that goes by values."""
    values = values_of(cu_seqlens, _lengths)
    if isinstance(longest, Tensor) and longest.numel() == 1 and longest.dtype in (torch.int32, torch.int64):
        read = None if values is None else values_of(longest, lambda x: x)
        longest = 0 if read is None else read[0]
        values = None if read is None else values
    longest = plain_integer(longest)
    check_length(longest_name, longest)
    if values is None:
        return
    first, least, most, last = values
    if first != 0:
        raise ValueError(f"{name} must start at 0, not at {first}")
    if least < 0:
        raise ValueError(f"{name} must not decrease, and does by {-least}")
    if last > total:
        raise ValueError(f"{name} must end at the number of tokens, {total}, or before, not at {last}")
    if most > longest:
        raise ValueError(f"{longest_name} must be at least the longest sequence's {most} tokens, not {longest}")


def _check_intervals(mask: Mask, sizes: Sizes) -> None:
    parts = [("mask.queries", mask.queries, sizes.seqlen_q)]
    if mask.keys is not None:
        parts.append(("mask.keys", mask.keys, sizes.seqlen_k))
    for name, x, length in parts:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be an int32 tensor, not {type(x).__name__}")
        if x.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, not {dtype_name(x.dtype)}")
        check_device(name, x, sizes.device)
        rows = 3 if name == "mask.queries" else 2
        if x.dim() != rows or x.shape[-1] != length or not broadcasts(x.shape[-2], sizes.batch):
            raise ValueError(
                f"{name} must be of {length} tokens in {_choice(sizes.batch)} rows, as q and k are, "
                f"not of the shape {tuple(x.shape)}"
            )
    if mask.keys is not None and mask.keys.shape[0] != mask.queries.shape[1]:
        raise ValueError(
            f"mask.keys must have as many rows as mask.queries, {mask.queries.shape[1]}, not {mask.keys.shape[0]}"
        )
    if mask.queries.shape[0] not in (5, 7):
        raise ValueError(f"mask.queries must have 5 or 7 rows, not {mask.queries.shape[0]}")
    if mask.seqlen_k != sizes.seqlen_k:
        raise ValueError(f"mask must be of {sizes.seqlen_k} keys, as k is, not of {mask.seqlen_k}")


def _check_blocks(mask: BlockMask, sizes: Sizes, causal: bool, window_size: tuple[int, int]) -> None:
    if (mask.seqlen_q, mask.seqlen_k) != (sizes.seqlen_q, sizes.seqlen_k):
        raise ValueError(
            f"mask must be of {sizes.seqlen_q} queries and {sizes.seqlen_k} keys, as q and k are, "
            f"not of {mask.seqlen_q} and {mask.seqlen_k}"
        )
    batch, heads = mask.query_rows.shape[:2]
    if not (broadcasts(batch, sizes.batch) and broadcasts(heads, sizes.heads)):
        raise ValueError(
            f"mask must be of {_choice(sizes.batch)} rows and {_choice(sizes.heads)} heads, as q is, "
            f"not of {batch} and {heads}"
        )
    check_device("mask", mask.query_rows, sizes.device)
    wanted = band(sizes.seqlen_q, sizes.seqlen_k, causal, window_size)
    if (mask.left, mask.right) != wanted:
        raise ValueError(
            f"mask must be made with the call's causal and window_size (the band {wanted}), "
            f"not with the band {(mask.left, mask.right)}"
        )


def _choice(size: int) -> str:
    return "1" if size == 1 else f"1 or {size}"


def _lengths(cu_seqlens: Tensor) -> Tensor:
    """The first value, the shortest and the longest sequence, the last value: one read for all of them."""
    lengths = cu_seqlens.diff()
    return torch.stack([cu_seqlens[0], lengths.amin(), lengths.amax(), cu_seqlens[-1]])
