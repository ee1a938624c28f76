"""The kernel that appends keys and values to the cache of flash_attn_with_kvcache.

B batch, Sn new keys, K key/value heads, D head dimension (BLOCK_D: padded to a power of two),
R rotated dimensions. A cache is P pages of L rows (P, L, K, D); a table (B, M) names the
pages of each sequence.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import Launch, ceil_div, padded

NEW_ROWS = 16  # keys that a program appends
NOT_SPECIALISED = [
    "sequences",
    "seqlen_q",
    "added",
    "size",
    "pages",
    "columns",
    "left",
    "right",
    "splits",
    "table_row",
]


class Constants(NamedTuple):
    """The compile-time numbers and switches of the append kernel and of
    decode.py's attend kernel."""

    group: int  # H / K
    head_dim: int
    block_d: int
    value_dim: int
    block_v: int
    rows: int  # of a program's tile
    keys: int
    paged: bool
    leftpad: bool
    rotary: int  # R, or 0
    interleaved: bool
    left: bool
    right: bool
    softcap: bool
    alibi: bool
    precision: str  # how `tl.dot` multiplies float32


@triton.jit
def page_and_row(table, row, inside, size, pages, PAGED: tl.constexpr):
    """Return (page, row in that page) for the indices `row` into a sequence's cache. table: pointer
    to the numbers of its pages; inside: which rows exist; size: rows a page; pages: pages in the
    cache."""
    if PAGED:
        page = tl.load(table + row // size, mask=inside, other=0)
        place = row % size
    else:
        page = tl.load(table)
        place = row
    return tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int64), place.to(tl.int64)


@triton.jit
def load_turned(pointers, inside, at, cos, sin, cos_row, sin_row, C: tl.constexpr):
    """Load rows (n, BLOCK_D) at pointers (n,), 0 if not `inside`, with rotary embedding
    for positions `at` (n,)."""
    d = tl.arange(0, C.block_d)[None, :]
    real = inside[:, None]
    x = tl.load(pointers[:, None] + d, mask=real & (d < C.head_dim), other=0.0)
    if C.rotary > 0:
        HALF: tl.constexpr = C.rotary // 2
        if C.interleaved:
            first = d % 2 == 0
            partner = tl.where(first, d + 1, d - 1)
            angle = d // 2
        else:
            first = d < HALF
            partner = tl.where(first, d + HALF, d - HALF)
            angle = tl.where(first, d, d - HALF)
        turned = real & (d < C.rotary)
        other = tl.load(pointers[:, None] + partner, mask=turned, other=0.0).to(tl.float32)
        c = tl.load(cos + at[:, None] * cos_row + angle, mask=turned, other=1.0).to(tl.float32)
        s = tl.load(sin + at[:, None] * sin_row + angle, mask=turned, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * c + tl.where(first, -other, other) * s).to(x.dtype)
    return x


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def append_kernel(
    k, v, k_cache, v_cache, lengths, table, cos, sin, k_strides, v_strides, k_cache_strides,
    v_cache_strides,
    cos_row, sin_row, angles, table_row, added, size, pages, columns, C: tl.constexpr,
):  # fmt: skip
    """Kernel: one program writes C.rows new keys (rotated) and values of one sequence and head to
    the cache, behind its lengths[b] rows. *_strides: by batch row (cache: page), row, head; *_row:
    row strides; angles: rows of cos and sin; added: new keys a sequence; size: rows a page; pages:
    pages in the cache; columns: pages a sequence (table's)."""
    batch = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    new = tl.program_id(2) * C.rows + tl.arange(0, C.rows)
    row = tl.load(lengths + batch) + new
    inside = (new < added) & (row >= 0) & (row < size * columns)
    page, place = page_and_row(table + batch * table_row, row, inside, size, pages, C.paged)
    new = new.to(tl.int64)
    at = tl.minimum(row, angles - 1).to(tl.int64)
    k_pointers = k + batch * k_strides[0] + new * k_strides[1] + head * k_strides[2]
    tile = load_turned(k_pointers, inside, at, cos, sin, cos_row, sin_row, C)
    d = tl.arange(0, C.block_d)[None, :]
    k_rows = (
        k_cache + page * k_cache_strides[0] + place * k_cache_strides[1] + head * k_cache_strides[2]
    )
    tl.store(k_rows[:, None] + d, tile, mask=inside[:, None] & (d < C.head_dim))
    d = tl.arange(0, C.block_v)[None, :]
    mask = inside[:, None] & (d < C.value_dim)
    v_pointers = v + batch * v_strides[0] + new * v_strides[1] + head * v_strides[2]
    values = tl.load(v_pointers[:, None] + d, mask=mask, other=0.0)
    v_rows = (
        v_cache + page * v_cache_strides[0] + place * v_cache_strides[1] + head * v_cache_strides[2]
    )
    tl.store(v_rows[:, None] + d, values, mask=mask)


def append_launch(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor, paged: bool, cos: torch.Tensor | None, sin: torch.Tensor | None,
    interleaved: bool,
) -> Launch:  # fmt: skip
    """Return the launch that writes k, v (B, Sn, K, D) to the caches (P, L, K, D), from
    rows `lengths` (B,) on."""
    batch, added, kv_heads, head_dim = k.shape
    constants = Constants(
        1, head_dim, padded(head_dim), v.shape[3], padded(v.shape[3]), NEW_ROWS, 0, paged, False,
        0 if cos is None else 2 * cos.shape[1], interleaved,
        False, False, False, False, "",
    )  # fmt: skip
    return Launch(
        kernel=append_kernel,
        grid=(batch, kv_heads, ceil_div(added, NEW_ROWS)),
        args=(
            k, v, k_cache, v_cache, lengths, table, *rotary_of(cos, sin, k), k.stride()[:3],
            v.stride()[:3],
            k_cache.stride()[:3], v_cache.stride()[:3], *rotary_rows(cos, sin), table.stride(0),
            added,
            k_cache.shape[1], k_cache.shape[0], table.shape[1],
        ),
        constants={"C": constants},
        options={"num_warps": 4 if constants.block_d <= 256 else 8},
    )  # fmt: skip


def rotary_of(cos: torch.Tensor | None, sin: torch.Tensor | None, unused: torch.Tensor) -> tuple:
    """Return (cos, sin) of the rotary embedding; without one any tensor, `unused`, twice:
    kernels need a tensor."""
    return (unused, unused) if cos is None or sin is None else (cos, sin)


def rotary_rows(cos: torch.Tensor | None, sin: torch.Tensor | None) -> tuple[int, int, int]:
    """Return (row stride of cos, row stride of sin, number of rows); (0, 0, 1)
    without rotary embedding."""
    return (0, 0, 1) if cos is None or sin is None else (cos.stride(0), sin.stride(0), cos.shape[0])
