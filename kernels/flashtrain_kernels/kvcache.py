"""Attention over a cache of keys and values, for generating text: flash-attn's
function, forward only.

B batch, Sq queries, Sn new keys, H query heads, K key/value heads, D head dimension, R rotated
dimensions of D. A cache is P pages of L rows: (P, L, K, D). A table (B, M) names the M pages that
hold each sequence's keys in order; a cache without pages is the case M = 1. C = M * L is the number
of keys that a sequence has room for.
"""

from typing import Any

import torch
from torch import Tensor

from . import cache_operators
from .arguments import (
    Sizes,
    Window,
    autocasted,
    check_alibi,
    check_heads,
    check_same,
    check_sink,
    check_softcap,
    check_tensor,
    check_values,
    plain_integer,
    plain_window,
    softmax_scale_or_default,
)
from .checks import (
    INTEGERS,
    check_device,
    check_dtype,
    check_flag,
    check_length,
    check_shape,
    check_window,
)
from .device_values import values_of
from .paging import check_block_table
from .sinks import join

MAX_SPLITS = 128


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    learnable_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append k and v to a cache in place, then compute exact attention of q over
    that cache; forward only.

    Arguments before the * have flash-attn 2.8's names, order, defaults and meaning.

    Args:
        q: (B, Sq, H, D).
        k_cache, v_cache: (caches, C, K, D) or, with block_table, pages (P, L, K, D) of any length
            L; q's dtype, last stride 1. The last dimension of v_cache, v and out may be less, Dv.
        k, v: (B, Sn, K, D), written to the cache rows from cache_seqlens on (rows beyond the cache
            are skipped). Give both or neither.
        rotary_cos, rotary_sin: (C or more, R / 2), floating; only with k. They rotate new keys
            (RoFormer, arXiv 2104.09864) by their row in the cache, and query i by row
            cache_seqlens + i (without causal and window: cache_seqlens).
        cache_seqlens: how many cache rows of each sequence are filled before k is appended: an
            integer or (B,) int32; None: all C.
        cache_batch_idx: (B,) int32: the index into k_cache for each sequence; None: 0 to
            B - 1. Not with block_table.
        cache_leftpad: (B,) int32: how many rows at the start of each sequence are padding; None: 0.
        block_table: (B, M) int32: the pages of each sequence, in order. Entries
            past its end are ignored.
        causal, window_size, alibi_slopes: as in `flash_attn_func`, with the last
            query at the last key.
        rotary_interleaved: True: rotate dimensions (0, 1), (2, 3), ... as pairs; False: (0, R /
            2), (1, R / 2 + 1), ...
        num_splits: number of parts, 1 to 128, that a sequence's keys are divided into; the GPU
            computes the parts in parallel and merges them. 0: as many as fill the GPU.
        softmax_scale, softcap, learnable_sink: as in `flash_attn_func`.

    Returns:
        out (B, Sq, H, D), or with return_softmax_lse (out, lse (B, H, Sq) float32). A query that
        sees no key has output 0 and log-sum-exp -inf.

    Raises:
        TypeError, ValueError: the message names the argument. Lengths are checked on the CPU only;
            on a GPU, lengths above C are taken as C.
    """
    q, k, v = autocasted(q, k, v)
    table, capacity = _check_tensors(q, k_cache, v_cache, k, v, cache_batch_idx, block_table)
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    sizes = Sizes(batch, tokens, capacity, heads, kv_heads, head_dim, batch, q.dtype, q.device)
    scale = softmax_scale_or_default(softmax_scale, head_dim)
    check_flag("causal", causal)
    check_flag("rotary_interleaved", rotary_interleaved)
    check_flag("return_softmax_lse", return_softmax_lse)
    window_size = plain_window(window_size)
    check_window("window_size", window_size)
    check_softcap(softcap)
    check_alibi(alibi_slopes, sizes, None)
    check_sink(learnable_sink, sizes)
    num_splits = plain_integer(num_splits)
    check_length("num_splits", num_splits)
    if num_splits > MAX_SPLITS:
        raise ValueError(f"num_splits must be at most {MAX_SPLITS}, not {num_splits}")
    added = 0 if k is None else k.shape[1]
    lengths = _lengths(cache_seqlens, q, capacity, added, k is not None)
    if cache_leftpad is not None:
        cache_leftpad = _rows("cache_leftpad", cache_leftpad, q)
    _check_rotary(rotary_cos, rotary_sin, sizes, k is not None)
    rotary = (rotary_cos, rotary_sin, rotary_interleaved)
    left, right = window_size[0], 0 if causal else window_size[1]
    paged = block_table is not None
    if k is not None and v is not None:
        cache_operators.append(k, v, k_cache, v_cache, lengths, table, paged, *rotary)
    out, lse = cache_operators.attend(
        q, k_cache, v_cache, lengths, cache_leftpad, table, paged, added, *rotary, scale, left,
        right, float(softcap),
        alibi_slopes, num_splits,
    )  # fmt: skip
    if learnable_sink is not None:
        out, lse = join(out, lse, learnable_sink)
    return (out, lse) if return_softmax_lse else out


def _check_tensors(
    q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, batch_index: Any, block_table: Any
) -> tuple[Tensor, int]:
    """Check the tensors and return the table (B, M) of the pages of each sequence, and C. Raises
    TypeError or ValueError."""
    check_tensor("q", q, "(B, Sq, H, D)")
    layout = "(caches, C, K, D)" if block_table is None else "(pages, page size, K, D)"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, cache, layout)
        check_same(name, cache, "q", q)
        if cache is v_cache:
            check_values("k_cache", k_cache, "v_cache", v_cache)
        if cache.stride(-1) != 1 and cache.shape[-1] > 1:
            raise ValueError(
                f"{name} must have a last stride of 1, as it is written in place, "
                f"not {cache.stride(-1)}"
            )
    batch = q.shape[0]
    check_heads(q, k_cache, "k_cache")
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together, or neither")
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x is not None:
            check_tensor(name, x, "(B, Sn, K, D)")
            check_same(name, x, "q", q)
            check_shape(name, x, (batch, k.shape[1], *cache.shape[2:]), "(B, Sn, K, D)")
    if block_table is not None:
        if batch_index is not None:
            raise ValueError(
                "cache_batch_idx must be None with block_table, which says where each sequence lies"
            )
        check_block_table(block_table, batch, k_cache)
        return block_table, block_table.shape[1] * k_cache.shape[1]
    caches = k_cache.shape[0]
    if batch_index is None:
        if caches != batch:
            raise ValueError(
                f"k_cache must hold q's {batch} sequences, not {caches} (or give cache_batch_idx)"
            )
        return torch.arange(batch, device=q.device, dtype=torch.int32)[:, None], k_cache.shape[1]
    index = _rows("cache_batch_idx", batch_index, q)
    found = _least_and_most(index)
    if found is not None and not 0 <= found[0] <= found[1] < caches:
        raise ValueError(
            f"cache_batch_idx must be 0 to less than k_cache's {caches}, "
            f"not {found[0]} to {found[1]}"
        )
    return index[:, None], k_cache.shape[1]


def _rows(name: str, x: Any, q: Tensor) -> Tensor:
    """Return x, checked to be integers (B,), as int32."""
    check_dtype(name, x, "(B,)", INTEGERS)
    check_device(name, x, q.device)
    check_shape(name, x, q.shape[:1], "(B,)")
    return x.to(torch.int32)


def _lengths(cache_seqlens: Any, q: Tensor, capacity: int, added: int, appends: bool) -> Tensor:
    """Return (B,) int32: how many cache rows of each sequence are filled before the new keys.
    added: number of new keys; appends: whether k and v are given."""
    if cache_seqlens is None:
        if appends:
            raise ValueError("cache_seqlens must be given with k and v: it says where they go")
        cache_seqlens = capacity
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = plain_integer(cache_seqlens)
        check_length("cache_seqlens", cache_seqlens)
        most: int | None = cache_seqlens
        lengths = torch.full(q.shape[:1], cache_seqlens, dtype=torch.int32, device=q.device)
    else:
        lengths = _rows("cache_seqlens", cache_seqlens, q)
        found = _least_and_most(lengths)
        if found is not None and found[0] < 0:
            raise ValueError(f"cache_seqlens must be 0 or more, not {found[0]}")
        most = None if found is None else found[1]
    if most is not None and most + added > capacity:
        new = f" and {added} new ones" if appends else ""
        raise ValueError(
            f"cache_seqlens must leave room in the cache: {most} keys{new} are more than the "
            f"{capacity} that k_cache (with block_table: a sequence's pages) has room for"
        )
    return lengths


def _least_and_most(x: Tensor) -> tuple[int, ...] | None:
    # Read on a CPU only: a GPU's change at every token, so that each call would wait for it.
    on_cpu = x.device.type == "cpu" and x.numel() > 0
    return (
        values_of(x, lambda values: torch.stack([values.amin(), values.amax()])) if on_cpu else None
    )


def _check_rotary(cos: Any, sin: Any, sizes: Sizes, appends: bool) -> None:
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos and rotary_sin must be given together, or neither")
    if cos is None:
        return
    if not appends:
        raise ValueError(
            "rotary_cos and rotary_sin must be None without k and v, the keys that they rotate"
        )
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_tensor(name, x, "(C, R / 2)")
        check_device(name, x, sizes.device)
        if (
            x.shape != cos.shape
            or x.shape[0] < sizes.seqlen_k
            or not 1 <= x.shape[1] <= sizes.head_dim // 2
        ):
            raise ValueError(
                f"{name} must have the shape (C, R / 2), with {sizes.seqlen_k} rows or "
                f"more and 1 to {sizes.head_dim // 2} columns, the same for rotary_cos and "
                f"rotary_sin, not {tuple(x.shape)}"
            )
