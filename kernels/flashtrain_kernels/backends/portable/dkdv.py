"""The kernel for dK and dV: one program owns BLOCK_K keys of one key/value head and loops over all their queries.

Sq queries, Sk keys, H query heads, K key/value heads, D head dimension. It works on transposed scores, S^T = K Q^T, so
that P^T and dS^T are left operands, in registers, of the products for dV and dK. It reads the base-2 log-sum-exp and
delta that the dQ kernel, launched before it, wrote.
"""

import triton
import triton.language as tl

from .launch import NOT_SPECIALISED
from .scores import head_options, kept, load_bias, logits, with_slope
from .tiles import (
    CAREFUL_BLOCK,
    has_nan,
    is_finite,
    key_position,
    load_own_tile,
    load_tile,
    query_rows,
    sees,
    store_tile,
)
from .traversal import listed_block, position_of_step, query_pieces, steps


@triton.jit
def _keys_loop(
    dk,
    dv,
    k,
    v,
    key,
    position,
    queries,
    bounds,
    pieces,
    head,
    keep_scale,
    MASKED: tl.constexpr,
    CAREFUL: tl.constexpr,
    F: tl.constexpr,
    TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what the masked (or the unmasked) query tiles of one head give to dK (unscaled) and dV."""
    (
        q_base, stride_qs, dout_base, stride_gs, lse2_base, delta_base, batch, first_key, mask_base, plane, list_ptr
    ) = queries  # fmt: skip
    block = listed_block(0, pieces, list_ptr, MASKED, CAREFUL, F, TILES)
    # A band's masked loop is short: filling its pipeline costs more time, and registers, than it saves.
    for i in tl.range(
        0,
        steps(pieces, MASKED, CAREFUL, BLOCK_Q // STEP),
        num_stages=1 if MASKED and (CAREFUL or not F.intervals) else None,
    ):
        first_query = position_of_step(i, block, pieces, list_ptr, MASKED, CAREFUL, F, TILES, BLOCK_Q, STEP)
        block = listed_block(i + 1, pieces, list_ptr, MASKED, CAREFUL, F, TILES)
        left = bounds[0] - first_query
        offset = tl.cast(first_query, tl.int64)
        row = tl.arange(0, STEP)
        q = load_tile(q_base + offset * stride_qs, stride_qs, left, MASKED, STEP, HEAD_DIM, BLOCK_D)
        if MASKED:
            lse2 = tl.load(lse2_base + first_query + row, mask=row < left, other=float("inf"))
        else:
            lse2 = tl.load(lse2_base + first_query + row)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if MASKED or F.alibi or F.bias or F.dropout:
            rows = query_rows(first_query + row[None, :], batch, bounds, mask_base, plane, F)
            rows = with_slope(rows, head, F)
        else:
            rows = head  # nothing of it is read
        if F.softcap or F.alibi or F.bias:
            scores, capped = logits(scores, head, rows, key, first_key, position, bounds, F)
            p = tl.exp2(scores - lse2[None, :])
        else:
            p = tl.exp2(scores * head[0] - lse2[None, :])
        if MASKED:
            mask = sees(rows, key, position, bounds, False, F)
            if CAREFUL:  # rows past Sq count here: their weight is 0, but 0 * NaN is NaN
                mask = mask & (rows[0] < bounds[0])
            if CAREFUL and F.bias:
                mask = mask & (load_bias(head, rows, key, bounds) != float("-inf"))
            p = tl.where(mask, p, 0.0)
        dout = load_tile(dout_base + offset * stride_gs, stride_gs, left, MASKED, STEP, HEAD_DIM, BLOCK_D)
        if MASKED:
            delta = tl.load(delta_base + first_query + row, mask=row < left, other=0.0)
        else:
            delta = tl.load(delta_base + first_query + row)
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        if F.dropout:
            keep = kept(head, rows, first_key, position, True, F, STEP, BLOCK_K)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        ds = p * (dp - delta[None, :])
        if F.softcap:
            ds *= 1.0 - capped * capped
        if F.dropout:
            p = tl.where(keep, p, 0.0)
        if CAREFUL:
            # Masked pairs give nothing; a visible NaN or inf of dO shows in delta, and reaches the keys it belongs to.
            ds = tl.where(mask, ds, 0.0)
            p = tl.where(mask & (is_finite(delta)[None, :] == 0), float("nan"), p)
            q = tl.where(is_finite(q), q, 0.0).to(q.dtype)
            dout = tl.where(is_finite(dout), dout, 0.0).to(dout.dtype)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _add_heads(
    dk,
    dv,
    k,
    v,
    key,
    position,
    batch,
    first_head,
    row,
    first_key,
    call,
    bounds,
    keep_scale,
    MASKED: tl.constexpr,
    CAREFUL: tl.constexpr,
    F: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what the queries of the group's heads give. call: pointers, those of the first head, and strides."""
    (
        q_base, stride_qs, stride_qh, dout_base, stride_gs, stride_gh, lse2_ptr, delta_ptr,
        mask_ptr, mask_plane, table_ptr, stride_th, stride_tr, list_ptr, scale_log2, cap_in, cap_log2, slopes_ptr,
        stride_slopes, bias_ptr, stride_bh, stride_bq, stride_bk, seed_ptr, threshold,
    ) = call  # fmt: skip
    # Pointers are moved on from head to head: computed anew, their parts would stay in registers all along.
    for member in tl.range(0, GROUP, num_stages=1):
        head = first_head + member
        pieces = query_pieces(first_key, bounds, table_ptr + head * stride_th, stride_tr, F, BLOCK_Q, BLOCK_K)
        queries = (
            q_base, stride_qs, dout_base, stride_gs, lse2_ptr + row, delta_ptr + row, batch, first_key, mask_ptr,
            mask_plane, list_ptr,
        )  # fmt: skip
        options = head_options(
            head, scale_log2, cap_in, cap_log2, slopes_ptr, stride_slopes, bias_ptr + head * stride_bh, stride_bq,
            stride_bk, seed_ptr, threshold, F,
        )  # fmt: skip
        dk, dv = _keys_loop(
            dk, dv, k, v, key, position, queries, bounds, pieces, options, keep_scale, MASKED, CAREFUL, F, TILES,
            HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, STEP, PRECISION,
        )  # fmt: skip
        q_base += stride_qh
        dout_base += stride_gh
        row += bounds[0]
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
    scale,
    bias_ptr,
    stride_bb,
    stride_bh,
    stride_bq,
    stride_bk,
    slopes_ptr,
    stride_slopes,
    seed_ptr,
    mask_ptr,
    mask_plane,
    stride_mask,
    positions_ptr,
    stride_positions,
    table_ptr,
    stride_tb,
    stride_th,
    stride_tr,
    list_ptr,
    heads,
    seqlen_q,
    seqlen_k,
    band_left,
    band_right,
    scale_log2,
    cap_in,
    cap_log2,
    threshold,
    keep_scale,
    F: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
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
    kv_heads = heads // GROUP
    batch = (head_index // kv_heads).to(tl.int64)
    kv_head = (head_index % kv_heads).to(tl.int64)
    key = first_key + tl.arange(0, BLOCK_K)[:, None]
    offset = tl.cast(first_key, tl.int64)
    left = seqlen_k - first_key
    bounds = (seqlen_q, seqlen_k, band_left, band_right)
    position = key_position(positions_ptr + batch * stride_positions, key, seqlen_k, F)
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kh + offset * stride_ks
    v_base = v_ptr + batch * stride_vb + kv_head * stride_vh + offset * stride_vs
    k = load_own_tile(k_base, stride_ks, left, BLOCK_K, HEAD_DIM, BLOCK_D)
    v = load_own_tile(v_base, stride_vs, left, BLOCK_K, HEAD_DIM, BLOCK_D)

    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    first_head = kv_head * GROUP
    row = (batch * heads + first_head) * seqlen_q
    call = (
        q_ptr + batch * stride_qb + first_head * stride_qh, stride_qs, stride_qh,
        dout_ptr + batch * stride_gb + first_head * stride_gh, stride_gs, stride_gh, lse2_ptr, delta_ptr,
        mask_ptr + batch * stride_mask, mask_plane, table_ptr + batch * stride_tb, stride_th, stride_tr, list_ptr,
        scale_log2, cap_in, cap_log2, slopes_ptr, stride_slopes, bias_ptr + batch * stride_bb, stride_bh, stride_bq,
        stride_bk, seed_ptr, threshold,
    )  # fmt: skip
    # All heads' full tiles, then all heads' masked ones: the registers of the two loops are then never alive at once.
    for MASKED in tl.static_range(2):
        dk, dv = _add_heads(
            dk, dv, k, v, key, position, batch, first_head, row, first_key, call, bounds, keep_scale, MASKED == 1,
            False, F, GROUP, TILES, HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, BLOCK_Q, PRECISION,
        )  # fmt: skip
    if F.left or F.right or F.intervals or F.block_q or F.bias:  # noqa: SIM102 - decided while compiling; while running
        if has_nan(dk) | has_nan(dv):  # rare: see the forward kernel
            dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
            dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
            dk, dv = _add_heads(
                dk, dv, k, v, key, position, batch, first_head, row, first_key, call, bounds, keep_scale, True,
                True, F, GROUP, TILES, HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, CAREFUL_BLOCK, PRECISION,
            )  # fmt: skip

    dk_base = dk_ptr + batch * stride_dkb + kv_head * stride_dkh + offset * stride_dks
    dv_base = dv_ptr + batch * stride_dvb + kv_head * stride_dvh + offset * stride_dvs
    if F.dropout:
        dv = dv * keep_scale
    store_tile(dk_base, stride_dks, left, dk * scale, BLOCK_K, HEAD_DIM, BLOCK_D)
    store_tile(dv_base, stride_dvs, left, dv, BLOCK_K, HEAD_DIM, BLOCK_D)
