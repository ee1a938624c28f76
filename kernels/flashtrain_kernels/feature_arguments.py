"""Checks of a call's features that come as tensors: ALiBi slopes, bias, dropout seed, masks, cumulative lengths.

B batch, Sq queries, Sk keys, H query heads, N sequences, T packed tokens.
"""

from typing import Any

import torch
from torch import Tensor

from .arguments import Sizes, broadcasts, check_device, check_length, dtype_name
from .masks import SEQUENCE, BlockMask, Mask
from .options import band
from .remembered import values_of


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


def check_cu_seqlens(
    name: str, cu_seqlens: Any, total: int, device: torch.device, longest_name: str, longest: Any
) -> None:
    """cu_seqlens (N + 1,) int32: 0, then where each sequence ends; longest: the longest one's length, or more.

    The values are checked where they can be read without harm: always on the CPU; on a GPU once for each tensor, and
    not while torch.compile traces or a CUDA graph is captured.
    """
    check_length(longest_name, longest)
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{name} must be an int32 tensor (N + 1,), not {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, not {dtype_name(cu_seqlens.dtype)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"{name} must have the shape (N + 1,) for N sequences, not {tuple(cu_seqlens.shape)}")
    check_device(name, cu_seqlens, device)
    values = values_of(cu_seqlens, _lengths)
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
        if x.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, not {dtype_name(x.dtype)}")
        check_device(name, x, sizes.device)
        rows = 3 if name == "mask.queries" else 2
        if x.dim() != rows or x.shape[-1] != length or not broadcasts(x.shape[-2], sizes.batch):
            raise ValueError(
                f"{name} must be of {length} tokens in {_choice(sizes.batch)} rows, as q and k are, "
                f"not of the shape {tuple(x.shape)}"
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
