"""The backward kernels (FlashAttention-2, arXiv 2307.08691, algorithm 2), without atomics: bitwise deterministic.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.

1. prepare: delta = rowsum(dO * O) - dLSE for each query, and the log-sum-exp in base 2.
2. dkdv: one program owns BLOCK_K keys of one key/value head and loops over the queries of all its query heads. It
works on
   transposed scores, S^T = K Q^T, so that P^T and dS^T are left operands of the products for dV and dK.
3. dq: one program owns BLOCK_Q queries and loops over their keys.
"""

import math

import torch
import triton
import triton.language as tl

from .launch import NOT_SPECIALISED, Launch, precision
from .tiles import CAREFUL_BLOCK, has_nan, is_finite, key_tiles, load_tile, masked_tile, query_tiles, sees, store_tile


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def prepare_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    lse2_ptr,
    delta_ptr,
    stride_ob,
    stride_os,
    stride_oh,
    stride_gb,
    stride_gs,
    stride_gh,
    heads,
    seqlen_q,
    HAS_DLSE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    tiles = tl.cdiv(seqlen_q, BLOCK_Q)
    first_query = (tl.program_id(0) % tiles) * BLOCK_Q
    head_index = tl.program_id(0) // tiles
    batch = (head_index // heads).to(tl.int64)
    head = (head_index % heads).to(tl.int64)
    position = tl.cast(first_query, tl.int64)
    left = seqlen_q - first_query
    out_base = out_ptr + batch * stride_ob + head * stride_oh + position * stride_os
    dout_base = dout_ptr + batch * stride_gb + head * stride_gh + position * stride_gs
    out = load_tile(out_base, stride_os, left, True, BLOCK_Q, HEAD_DIM, BLOCK_D)
    dout = load_tile(dout_base, stride_gs, left, True, BLOCK_Q, HEAD_DIM, BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    row = tl.arange(0, BLOCK_Q)
    rows = tl.cast(head_index, tl.int64) * seqlen_q + position + row
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + rows, mask=row < left, other=0.0)
    lse = tl.load(lse_ptr + rows, mask=row < left, other=0.0)
    tl.store(lse2_ptr + rows, lse * 1.4426950408889634, mask=row < left)
    tl.store(delta_ptr + rows, delta, mask=row < left)


@triton.jit
def _keys_loop(
    dk,
    dv,
    k,
    v,
    q_base,
    dout_base,
    lse2_base,
    delta_base,
    stride_qs,
    stride_gs,
    key,
    key_start,
    key_end,
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
    BLOCK_Q: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what the masked (or the unmasked) query tiles of one head give to dK (unscaled) and dV."""
    if MASKED:
        count = (first_full - first) + (past - past_full)
    else:
        count = past_full - first_full
    for i in tl.range(0, count):
        if MASKED:
            first_query = masked_tile(i, first, first_full, past_full) * BLOCK_Q
        else:
            first_query = (first_full + i) * BLOCK_Q
        left = seqlen_q - first_query
        position = tl.cast(first_query, tl.int64)
        row = tl.arange(0, BLOCK_Q)
        q = load_tile(q_base + position * stride_qs, stride_qs, left, MASKED, BLOCK_Q, HEAD_DIM, BLOCK_D)
        if MASKED:
            lse2 = tl.load(lse2_base + first_query + row, mask=row < left, other=float("inf"))
        else:
            lse2 = tl.load(lse2_base + first_query + row)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        p = tl.exp2(scores * scale_log2 - lse2[None, :])
        if MASKED:
            query = first_query + row[None, :]
            mask = sees(query, key[:, None], query, key_start, key_end, seqlen_q, seqlen_k, CAUSAL, DOCUMENTS)
            p = tl.where(mask, p, 0.0)
        dout = load_tile(dout_base + position * stride_gs, stride_gs, left, MASKED, BLOCK_Q, HEAD_DIM, BLOCK_D)
        if MASKED:
            delta = tl.load(delta_base + first_query + row, mask=row < left, other=0.0)
        else:
            delta = tl.load(delta_base + first_query + row)
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        if CAREFUL:
            # Masked pairs give nothing; a visible NaN or inf of dO shows in delta, and reaches the keys it belongs to.
            ds = tl.where(mask, ds, 0.0)
            p = tl.where(mask & (is_finite(delta)[None, :] == 0), float("nan"), p)
            q = tl.where(is_finite(q), q, 0.0).to(q.dtype)
            dout = tl.where(is_finite(dout), dout, 0.0).to(dout.dtype)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
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
    stride_dkb,
    stride_dks,
    stride_dkh,
    stride_dvb,
    stride_dvs,
    stride_dvh,
    kv_heads,
    seqlen_q,
    seqlen_k,
    scale,
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
    # Under a causal mask the first keys are seen by the most queries, so the natural order is already longest first.
    tiles = tl.cdiv(seqlen_k, BLOCK_K)
    first_key = (tl.program_id(0) % tiles) * BLOCK_K
    head_index = tl.program_id(0) // tiles
    batch = (head_index // kv_heads).to(tl.int64)
    kv_head = (head_index % kv_heads).to(tl.int64)
    key = first_key + tl.arange(0, BLOCK_K)
    position = tl.cast(first_key, tl.int64)
    left = seqlen_k - first_key
    start_base = start_ptr + batch * seqlen_k
    end_base = end_ptr + batch * seqlen_k

    key_start = 0
    key_end = 0
    if DOCUMENTS:
        key_start = tl.load(start_base + key, mask=key < seqlen_k, other=0)[:, None]
        key_end = tl.load(end_base + key, mask=key < seqlen_k, other=0)[:, None]
    first, first_full, past_full, past = query_tiles(
        first_key, seqlen_q, seqlen_k, start_base, end_base, CAUSAL, DOCUMENTS, BLOCK_Q, BLOCK_K
    )
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kh + position * stride_ks
    v_base = v_ptr + batch * stride_vb + kv_head * stride_vh + position * stride_vs
    k = load_tile(k_base, stride_ks, left, True, BLOCK_K, HEAD_DIM, BLOCK_D)
    v = load_tile(v_base, stride_vs, left, True, BLOCK_K, HEAD_DIM, BLOCK_D)

    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for member in tl.range(0, GROUP, num_stages=1):
        head = kv_head * GROUP + member
        q_base = q_ptr + batch * stride_qb + head * stride_qh
        dout_base = dout_ptr + batch * stride_gb + head * stride_gh
        rows = (batch * kv_heads * GROUP + head) * seqlen_q
        for MASKED in tl.static_range(2):
            dk, dv = _keys_loop(
                dk, dv, k, v, q_base, dout_base, lse2_ptr + rows, delta_ptr + rows, stride_qs, stride_gs, key,
                key_start,
                key_end, seqlen_q, seqlen_k, scale_log2, first, first_full, past_full, past, MASKED == 1, False, CAUSAL,
                DOCUMENTS, HEAD_DIM, BLOCK_D, BLOCK_Q, PRECISION,
            )  # fmt: skip
    if CAUSAL or DOCUMENTS:  # noqa: SIM102 - the first is decided while compiling, the second while running
        if has_nan(dk) | has_nan(dv):  # rare: see the forward kernel
            dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
            dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
            past = past * (BLOCK_Q // CAREFUL_BLOCK)
            for member in tl.range(0, GROUP, num_stages=1):
                head = kv_head * GROUP + member
                q_base = q_ptr + batch * stride_qb + head * stride_qh
                dout_base = dout_ptr + batch * stride_gb + head * stride_gh
                rows = (batch * kv_heads * GROUP + head) * seqlen_q
                dk, dv = _keys_loop(
                    dk, dv, k, v, q_base, dout_base, lse2_ptr + rows, delta_ptr + rows, stride_qs, stride_gs, key,
                    key_start, key_end, seqlen_q, seqlen_k, scale_log2, first * (BLOCK_Q // CAREFUL_BLOCK), past,
                    past, past,
                    True, True, CAUSAL, DOCUMENTS, HEAD_DIM, BLOCK_D, CAREFUL_BLOCK, PRECISION,
                )  # fmt: skip

    dk_base = dk_ptr + batch * stride_dkb + kv_head * stride_dkh + position * stride_dks
    dv_base = dv_ptr + batch * stride_dvb + kv_head * stride_dvh + position * stride_dvs
    store_tile(dk_base, stride_dks, left, dk * scale, BLOCK_K, HEAD_DIM, BLOCK_D)
    store_tile(dv_base, stride_dvs, left, dv, BLOCK_K, HEAD_DIM, BLOCK_D)


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
    for i in tl.range(0, count):
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
    stride_dqb,
    stride_dqs,
    stride_dqh,
    heads,
    seqlen_q,
    seqlen_k,
    scale,
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
    rows = tl.cast(head_index, tl.int64) * seqlen_q
    lse2 = tl.load(lse2_ptr + rows + query, mask=query < seqlen_q, other=float("inf"))
    delta = tl.load(delta_ptr + rows + query, mask=query < seqlen_q, other=0.0)

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


def backward_launches(
    dout, dlse, q, k, v, out, lse, documents, scale, causal, dq, dk, dv, rows, tile_dkdv, tile_dq, tf32=True
) -> tuple[Launch, Launch, Launch]:
    """The three launches, in order, that fill dq, dk and dv. rows: (2, B, H, Sq) float32 workspace (base-2 LSE,
    delta)."""
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    block_d = max(16, triton.next_power_of_2(head_dim))
    start, end = (lse, lse) if documents is None else documents  # never read without documents; only has to be a tensor
    prepare_block = 64 if block_d >= 128 else 128
    prepare = Launch(
        kernel=prepare_kernel,
        grid=(triton.cdiv(seqlen_q, prepare_block) * batch * heads,),
        args=(
            out, dout, lse, lse if dlse is None else dlse, rows[0], rows[1], *out.stride()[:3], *dout.stride()[:3],
            heads, seqlen_q,
        ),
        constants={
            "HAS_DLSE": dlse is not None, "HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_Q": prepare_block,
        },
        options={"num_warps": 4, "num_stages": 1},
    )  # fmt: skip
    inputs = (q, k, v, dout, rows[0], rows[1])
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
    constants = {
        "GROUP": heads // kv_heads,
        "CAUSAL": causal,
        "DOCUMENTS": documents is not None,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "PRECISION": precision(q.dtype, tf32),
    }
    scale_log2 = scale * math.log2(math.e)
    dkdv = Launch(
        kernel=dkdv_kernel,
        grid=(triton.cdiv(seqlen_k, tile_dkdv.block_k) * batch * kv_heads,),
        args=(
            *inputs, dk, dv, start, end, *strides, *dk.stride()[:3], *dv.stride()[:3],
            kv_heads, seqlen_q, seqlen_k, scale, scale_log2,
        ),
        constants={**constants, "BLOCK_Q": tile_dkdv.block_q, "BLOCK_K": tile_dkdv.block_k},
        options={"num_warps": tile_dkdv.warps, "num_stages": tile_dkdv.stages},
    )  # fmt: skip
    dquery = Launch(
        kernel=dq_kernel,
        grid=(triton.cdiv(seqlen_q, tile_dq.block_q) * batch * heads,),
        args=(*inputs, dq, start, end, *strides, *dq.stride()[:3], heads, seqlen_q, seqlen_k, scale, scale_log2),
        constants={**constants, "BLOCK_Q": tile_dq.block_q, "BLOCK_K": tile_dq.block_k},
        options={"num_warps": tile_dq.warps, "num_stages": tile_dq.stages},
    )
    return prepare, dkdv, dquery


def backward(
    dout, dlse, q, k, v, out, lse, documents, scale, causal, dq, dk, dv, tile_dkdv, tile_dq, tf32=True
) -> None:
    """Fill dq, dk and dv (any strides whose last is 1)."""
    rows = torch.empty((2, *lse.shape), dtype=torch.float32, device=lse.device)
    for launch in backward_launches(
        dout, dlse, q, k, v, out, lse, documents, scale, causal, dq, dk, dv, rows, tile_dkdv, tile_dq, tf32
    ):
        launch.run()
