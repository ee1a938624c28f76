"""The kernel for dK and dV: one program owns BLOCK_K keys of one key/value head and loops over all their queries.

Sq queries, Sk keys, H query heads, K key/value heads, D head dimension. It works on transposed scores, S^T = K Q^T, so
that P^T and dS^T are left operands, in registers, of the products for dV and dK. It reads the base-2 log-sum-exp and
delta that the dQ kernel, launched before it, wrote.
"""

import triton
import triton.language as tl

from .launch import NOT_SPECIALISED
from .tiles import CAREFUL_BLOCK, has_nan, is_finite, load_tile, masked_tile, query_tiles, sees, store_tile


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
    # Without documents the masked loop is short: filling its pipeline costs more time, and registers, than it saves.
    for i in tl.range(0, count, num_stages=1 if MASKED and (CAREFUL or not DOCUMENTS) else None):
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
