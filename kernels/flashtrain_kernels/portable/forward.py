"""The forward kernel: online softmax over key tiles (FlashAttention-2, arXiv 2307.08691, algorithm 1).

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.

One program computes BLOCK_Q queries of one head. Scores stay unscaled; scale * log2(e) enters with the one
fused multiply-add that also subtracts the row maximum, and exp2 replaces exp.
"""

import math

import torch
import triton
import triton.language as tl

from .launch import NOT_SPECIALISED, Launch, precision
from .tiles import CAREFUL_BLOCK, has_nan, is_finite, key_tiles, load_tile, masked_tile, sees, store_tile

# The row maximum of a row that has seen nothing yet. Finite, so that exp2(-inf - maximum) is 0 and never NaN.
_NOTHING = tl.constexpr(-3.0e38)


@triton.jit
def _attend(
    acc,
    row_sum,
    row_max,
    q,
    k_base,
    v_base,
    stride_ks,
    stride_vs,
    query,
    row_start,
    row_end,
    seqlen_q,
    seqlen_k,
    scale_log2,
    first,
    first_full,
    past_full,
    past,
    MASKED: tl.constexpr,
    CAREFUL: tl.constexpr,
    CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take the masked (or the unmasked) key tiles into the running output, sum and maximum of each row."""
    if MASKED:
        count = (first_full - first) + (past - past_full)
    else:
        count = past_full - first_full
    for i in tl.range(0, count):
        if MASKED:
            key = masked_tile(i, first, first_full, past_full) * BLOCK_K
        else:
            key = (first_full + i) * BLOCK_K
        position = tl.cast(key, tl.int64)
        k = load_tile(k_base + position * stride_ks, stride_ks, seqlen_k - key, MASKED, BLOCK_K, HEAD_DIM, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            keys = key + tl.arange(0, BLOCK_K)[None, :]
            mask = sees(query[:, None], keys, keys, row_start, row_end, seqlen_q, seqlen_k, CAUSAL, DOCUMENTS)
            scores = tl.where(mask, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max
        acc = acc * rescale[:, None]
        v = load_tile(v_base + position * stride_vs, stride_vs, seqlen_k - key, MASKED, BLOCK_K, HEAD_DIM, BLOCK_D)
        if CAREFUL:
            # 0 * NaN is NaN: keep inf and NaN out of the product, then give them to the rows that do see them.
            finite = is_finite(v)
            reached = tl.dot(mask.to(v.dtype), tl.where(finite, 0.0, 1.0).to(v.dtype), input_precision=PRECISION)
            v = tl.where(finite, v, 0.0).to(v.dtype)
            acc = tl.where(reached > 0, float("nan"), acc)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, row_sum, row_max


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    start_ptr,
    end_ptr,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_ob,
    stride_os,
    stride_oh,
    heads,
    seqlen_q,
    seqlen_k,
    scale_log2,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # The tiles of a head run next to each other, heads of one key/value group too: they share K and V in the L2 cache.
    tiles = tl.cdiv(seqlen_q, BLOCK_Q)
    tile = tl.program_id(0) % tiles
    head_index = tl.program_id(0) // tiles
    if CAUSAL:  # the last queries see the most keys: longest first, so that no long tile runs alone at the end
        tile = tiles - 1 - tile
    batch = (head_index // heads).to(tl.int64)
    head = (head_index % heads).to(tl.int64)
    first_query = tile * BLOCK_Q
    query = first_query + tl.arange(0, BLOCK_Q)
    position = tl.cast(first_query, tl.int64)
    k_base = k_ptr + batch * stride_kb + (head // GROUP) * stride_kh
    v_base = v_ptr + batch * stride_vb + (head // GROUP) * stride_vh
    start_base = start_ptr + batch * seqlen_q
    end_base = end_ptr + batch * seqlen_q

    row_start = 0
    row_end = 0
    if DOCUMENTS:
        row_start = tl.load(start_base + query, mask=query < seqlen_q, other=0)[:, None]
        row_end = tl.load(end_base + query, mask=query < seqlen_q, other=0)[:, None]
    first, first_full, past_full, past = key_tiles(
        first_query, seqlen_q, seqlen_k, start_base, end_base, CAUSAL, DOCUMENTS, BLOCK_Q, BLOCK_K
    )
    q_base = q_ptr + batch * stride_qb + head * stride_qh + position * stride_qs
    q = load_tile(q_base, stride_qs, seqlen_q - first_query, True, BLOCK_Q, HEAD_DIM, BLOCK_D)

    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    row_max = tl.full([BLOCK_Q], _NOTHING, tl.float32)
    for MASKED in tl.static_range(2):
        acc, row_sum, row_max = _attend(
            acc, row_sum, row_max, q, k_base, v_base, stride_ks, stride_vs, query, row_start, row_end, seqlen_q,
            seqlen_k,
            scale_log2, first, first_full, past_full, past, MASKED == 1, False, CAUSAL, DOCUMENTS, HEAD_DIM, BLOCK_D,
            BLOCK_K, PRECISION,
        )  # fmt: skip
    if CAUSAL or DOCUMENTS:  # noqa: SIM102 - the first is decided while compiling, the second while running
        if has_nan(acc):
            # Rare: a NaN, or an inf in a masked value (0 * inf). Compute again in small tiles, keeping masked pairs
            # out.
            past = past * (BLOCK_K // CAREFUL_BLOCK)
            acc, row_sum, row_max = _attend(
                tl.zeros([BLOCK_Q, BLOCK_D], tl.float32), tl.zeros([BLOCK_Q], tl.float32),
                tl.full([BLOCK_Q], _NOTHING, tl.float32), q, k_base, v_base, stride_ks, stride_vs, query, row_start,
                row_end,
                seqlen_q, seqlen_k, scale_log2, first * (BLOCK_K // CAREFUL_BLOCK), past, past, past, True, True,
                CAUSAL,
                DOCUMENTS, HEAD_DIM, BLOCK_D, CAREFUL_BLOCK, PRECISION,
            )  # fmt: skip

    empty = row_sum == 0
    acc = acc / tl.where(empty, 1.0, row_sum)[:, None]
    lse = (row_max + tl.log2(tl.where(empty, 1.0, row_sum))) * 0.6931471805599453
    lse = tl.where(empty, float("-inf"), lse)
    lse_base = lse_ptr + tl.cast(head_index, tl.int64) * seqlen_q
    tl.store(lse_base + query, lse, mask=query < seqlen_q)
    out_base = out_ptr + batch * stride_ob + head * stride_oh + position * stride_os
    store_tile(out_base, stride_os, seqlen_q - first_query, acc, BLOCK_Q, HEAD_DIM, BLOCK_D)


def forward_launch(q, k, v, out, lse, documents, scale, causal, tile, tf32=True) -> Launch:
    """The launch that fills out (B, Sq, H, D) and lse (B, H, Sq) from q (B, Sq, H, D), k, v (B, Sk, K, D)."""
    batch, seqlen_q, heads, head_dim = q.shape
    start, end = (lse, lse) if documents is None else documents  # never read without documents; only has to be a tensor
    return Launch(
        kernel=forward_kernel,
        grid=(triton.cdiv(seqlen_q, tile.block_q) * batch * heads,),
        args=(
            q, k, v, out, lse, start, end, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            heads, seqlen_q, k.shape[1], scale * math.log2(math.e),
        ),
        constants={
            "GROUP": heads // k.shape[2],
            "CAUSAL": causal,
            "DOCUMENTS": documents is not None,
            "HEAD_DIM": head_dim,
            "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
            "BLOCK_Q": tile.block_q,
            "BLOCK_K": tile.block_k,
            "PRECISION": precision(q.dtype, tf32),
        },
        options=tile.options(),
    )  # fmt: skip


def forward(q, k, v, documents, scale, causal, tile, tf32=True) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate and compute (out, lse)."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    forward_launch(q, k, v, out, lse, documents, scale, causal, tile, tf32).run()
    return out, lse
