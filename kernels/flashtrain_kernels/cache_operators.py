"""The two operators of flash_attn_with_kvcache: append new keys and values to a
cache, and attend to it.

B batch, Sq queries, Sn new keys, H query heads, K key/value heads, D head dimension, R rotated
dimensions of D. A cache is P pages of L rows (P, L, K, D); a table (B, M) names the pages that hold
each sequence's keys, M * L rows. On a GPU the operators are the kernels of
backends/portable/append.py and decode.py, elsewhere plain PyTorch.
"""

from typing import Any

import torch
from torch import Tensor

from . import dispatch, reference
from .backends import unit_stride
from .launch_cache import on_device
from .masks import Mask
from .options import Options

_DEVICES = ("cpu", "cuda")
_ROTARY = "Tensor? cos, Tensor? sin, bool interleaved"
_SCHEMAS = {
    "append_to_cache": (
        "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor lengths, "
        f"Tensor table, bool paged, {_ROTARY}) -> ()"
    ),
    "attend_to_cache": (
        "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, Tensor? leftpad, Tensor table, "
        f"bool paged, SymInt added, {_ROTARY}, float scale, SymInt left, SymInt right, float "
        "softcap, Tensor? slopes, int splits) -> (Tensor, Tensor)"
    ),
}


def append(*call: Any) -> None:
    """Write new keys (rotated) and values to the cache, from row lengths[b] of sequence b on. call:
    the arguments of append_to_cache in _SCHEMAS."""
    _run(torch.ops.flashtrain_kernels.append_to_cache.default, _compute_append, call)


def attend(*call: Any) -> tuple[Tensor, Tensor]:
    """Return (out (B, Sq, H, D), lse (B, H, Sq)) of q over a cache. call: the arguments of
    attend_to_cache in _SCHEMAS, as those of flash_attn_with_kvcache, but lengths (B,) do not count
    the `added` new keys, and left, right are the window (-1: no bound)."""
    return _run(torch.ops.flashtrain_kernels.attend_to_cache.default, _compute_attend, call)


def _run(operator: Any, function: Any, call: tuple) -> Any:
    """Return operator(*call), or function(*call) for a device on which the operator is not
    defined."""
    return (operator if call[0].device.type in (*_DEVICES, "meta") else function)(*call)


def _compute_append(*call: Any) -> None:
    if not dispatch.runs_kernels(call[0].device):
        _append(*call)
    elif call[0].numel():
        # Triton is imported only where it is used.
        from .backends.portable.append import append_launch

        with on_device(call[0].device):
            append_launch(*_readable(call)).run()


def _compute_attend(*call: Any) -> tuple[Tensor, Tensor]:
    if not dispatch.runs_kernels(call[0].device):
        return _attend(*call)
    from .backends.portable import decode

    dispatch.check_interpreter(call[0].dtype)
    with on_device(call[0].device):
        return decode.attend(*_readable(call))


def _readable(call: tuple) -> list[Any]:
    # The caches' last stride is 1 already.
    return [unit_stride(x) if isinstance(x, Tensor) else x for x in call]


for _name, _function in (
    ("append_to_cache", _compute_append),
    ("attend_to_cache", _compute_attend),
):
    torch.library.define(
        f"flashtrain_kernels::{_name}", _SCHEMAS[_name], tags=torch.Tag.pt2_compliant_tag
    )
    torch.library.impl(f"flashtrain_kernels::{_name}", _DEVICES, _function)


@torch.library.register_fake("flashtrain_kernels::append_to_cache")
def _append_fake(*_: Any) -> None:
    return None


@torch.library.register_fake("flashtrain_kernels::attend_to_cache")
def _attend_fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((*q.shape[:3], v_cache.shape[3]))
    return out, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=exact)


def _places(rows: Tensor, table: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return (page, row in that page), (B, n) each, of the rows (B, n) of the sequences, clamped
    into the cache. table (B, M): the pages of each sequence."""
    size, most = cache.shape[1], cache.shape[0] - 1
    rows = rows.clamp(0, max(table.shape[1] * size - 1, 0)).long()
    return table.long().gather(1, rows // size).clamp(0, most), rows % size


def rotated(
    x: Tensor, positions: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool
) -> Tensor:
    """Apply rotary embedding to R dimensions of x (B, S, heads, D), by positions (B,
    S), in float32 or more."""
    if cos is None or sin is None:
        return x
    exact = torch.promote_types(x.dtype, torch.float32)
    half, at = cos.shape[1], positions.clamp(0, cos.shape[0] - 1).long()
    c, s = cos[at][:, :, None].to(exact), sin[at][:, :, None].to(exact)
    first, rest = x[..., : 2 * half].to(exact), x[..., 2 * half :]
    if interleaved:
        a, b = first[..., 0::2], first[..., 1::2]
        turned = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
    else:
        a, b = first[..., :half], first[..., half:]
        turned = torch.cat((a * c - b * s, b * c + a * s), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def _append(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, table: Tensor,
    paged: bool,
    cos: Tensor | None, sin: Tensor | None, interleaved: bool,
) -> None:  # fmt: skip
    """Write k, rotated, and v to the rows from `lengths` on."""
    rows = lengths[:, None] + torch.arange(k.shape[1], device=k.device)
    fits = (rows >= 0) & (rows < table.shape[1] * k_cache.shape[1])
    page, row = (x[fits] for x in _places(rows, table, k_cache))
    k_cache[page, row] = rotated(k, rows, cos, sin, interleaved)[fits]
    v_cache[page, row] = v[fits]


def _attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, leftpad: Tensor | None,
    table: Tensor, paged: bool,
    added: int, cos: Tensor | None, sin: Tensor | None, interleaved: bool, scale: float, left: int,
    right: int,
    softcap: float, slopes: Tensor | None, splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out (B, Sq, H, D), lse (B, H, Sq)), contiguous. left, right: the window, -1 for no bound."""
    batch, seqlen_q = q.shape[:2]
    capacity = table.shape[1] * k_cache.shape[1]
    query = torch.arange(seqlen_q, device=q.device)[None]
    moves = query if left >= 0 or right >= 0 else query * 0
    turned = rotated(q, lengths[:, None] + moves, cos, sin, interleaved)
    pad = torch.zeros_like(lengths) if leftpad is None else leftpad.clamp(min=0)
    length = ((lengths + added).clamp(max=capacity) - pad).clamp(min=0)[:, None]
    position = (length - seqlen_q + query).expand(batch, seqlen_q)
    low = torch.zeros_like(position) if left < 0 else (position - left).clamp(min=0)
    high = length.expand_as(position) if right < 0 else torch.minimum(position + right + 1, length)
    sequence = torch.arange(batch, device=q.device)[:, None].expand_as(position)
    rows = torch.stack(
        (low, torch.maximum(low, high), position, torch.zeros_like(position), sequence)
    ).int()
    page, row = _places(pad[:, None] + torch.arange(capacity, device=q.device), table, k_cache)
    options = Options(scale, softcap=softcap, alibi_slopes=slopes, mask=Mask(rows, None, capacity))
    with torch.autocast(q.device.type, enabled=False):
        out, lse = reference.forward_from(turned, k_cache[page, row], v_cache[page, row], options)
    return out.contiguous(), lse.contiguous()
