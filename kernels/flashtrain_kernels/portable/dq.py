"""The kernel for dQ: one program owns BLOCK_Q queries and loops over their keys.

Sq queries, Sk keys, H query heads, K key/value heads, D head dimension. It holds dO anyway, so it also computes what
both kernels need for each query, delta = rowsum(dO * O) - dLSE and the log-sum-exp in base 2, and leaves them for the
dK, dV kernel: a kernel for that alone would read dO once more.
"""

import triton
import triton.language as tl

from .launch import NOT_SPECIALISED
from .tiles import CAREFUL_BLOCK, has_nan, is_finite, key_tiles, load_tile, masked_tile, sees, store_tile


@triton.jit
def _queries_loop(
    dq,
    q,
    dout,
    lse2,
    delta,
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
    """Add what the masked (or the unmasked) key tiles give to dQ (unscaled)."""
    if MASKED:
        count = (first_full - first) + (past - past_full)
    else:
        count = past_full - first_full
    # Without documents the masked loop is short: filling its pipeline costs more time, and registers, than it saves.
    for i in tl.range(0, count, num_stages=1 if MASKED and (CAREFUL or not DOCUMENTS) else None):
        if MASKED:
            key = masked_tile(i, first, first_full, past_full) * BLOCK_K
        else:
            key = (first_full + i) * BLOCK_K
        position = tl.cast(key, tl.int64)
        k = load_tile(k_base + position * stride_ks, stride_ks, seqlen_k - key, MASKED, BLOCK_K, HEAD_DIM, BLOCK_D)
        v = load_tile(v_base + position * stride_vs, stride_vs, seqlen_k - key, MASKED, BLOCK_K, HEAD_DIM, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p = tl.exp2(scores * scale_log2 - lse2[:, None])
        if MASKED:
            keys = key + tl.arange(0, BLOCK_K)[None, :]
            mask = sees(query[:, None], keys, keys, row_start, row_end, seqlen_q, seqlen_k, CAUSAL, DOCUMENTS)
            p = tl.where(mask, p, 0.0)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        if CAREFUL:
            ds = tl.where(mask, ds, 0.0)
            k = tl.where(is_finite(k), k, 0.0).to(k.dtype)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    out_ptr,
    lse_ptr,
    dlse_ptr,
    lse2_ptr,
    delta_ptr,
    dq_ptr,
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
    stride_gb,
    stride_gs,
    stride_gh,
    stride_ob,
    stride_os,
    stride_oh,
    stride_dqb,
    stride_dqs,
    stride_dqh,
    heads,
    seqlen_q,
    seqlen_k,
    scale,
    scale_log2,
    HAS_DLSE: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = tl.cdiv(seqlen_q, BLOCK_Q)
    tile = tl.program_id(0) % tiles
    head_index = tl.program_id(0) // tiles
    if CAUSAL:  # longest first, as in the forward kernel
        tile = tiles - 1 - tile
    batch = (head_index // heads).to(tl.int64)
    head = (head_index % heads).to(tl.int64)
    first_query = tile * BLOCK_Q
    query = first_query + tl.arange(0, BLOCK_Q)
    position = tl.cast(first_query, tl.int64)
    left = seqlen_q - first_query
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
    dout_base = dout_ptr + batch * stride_gb + head * stride_gh + position * stride_gs
    q = load_tile(q_base, stride_qs, left, True, BLOCK_Q, HEAD_DIM, BLOCK_D)
    dout = load_tile(dout_base, stride_gs, left, True, BLOCK_Q, HEAD_DIM, BLOCK_D)
    out_base = out_ptr + batch * stride_ob + head * stride_oh + position * stride_os
    out = load_tile(out_base, stride_os, left, True, BLOCK_Q, HEAD_DIM, BLOCK_D)
    rows = tl.cast(head_index, tl.int64) * seqlen_q + query
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + rows, mask=query < seqlen_q, other=0.0)
    lse2 = tl.load(lse_ptr + rows, mask=query < seqlen_q, other=float("inf")) * 1.4426950408889634
    tl.store(lse2_ptr + rows, lse2, mask=query < seqlen_q)
    tl.store(delta_ptr + rows, delta, mask=query < seqlen_q)

    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for MASKED in tl.static_range(2):
        dq = _queries_loop(
            dq, q, dout, lse2, delta, k_base, v_base, stride_ks, stride_vs, query, row_start, row_end, seqlen_q,
            seqlen_k,
            scale_log2, first, first_full, past_full, past, MASKED == 1, False, CAUSAL, DOCUMENTS, HEAD_DIM, BLOCK_D,
            BLOCK_K, PRECISION,
        )  # fmt: skip
    if CAUSAL or DOCUMENTS:  # noqa: SIM102 - the first is decided while compiling, the second while running
        if has_nan(dq):  # rare: see the forward kernel
            past = past * (BLOCK_K // CAREFUL_BLOCK)
            dq = _queries_loop(
                tl.zeros([BLOCK_Q, BLOCK_D], tl.float32), q, dout, lse2, delta, k_base, v_base, stride_ks, stride_vs,
                query,
                row_start, row_end, seqlen_q, seqlen_k, scale_log2, first * (BLOCK_K // CAREFUL_BLOCK), past, past,
                past,
                True, True, CAUSAL, DOCUMENTS, HEAD_DIM, BLOCK_D, CAREFUL_BLOCK, PRECISION,
            )  # fmt: skip
    dq_base = dq_ptr + batch * stride_dqb + head * stride_dqh + position * stride_dqs
    store_tile(dq_base, stride_dqs, left, dq * scale, BLOCK_Q, HEAD_DIM, BLOCK_D)
