"""The kernel for dQ: one program owns BLOCK_Q queries and loops over their keys.

Sq queries, Sk keys, H query heads, K key/value heads, D head dimension. Launched before the dK, dV kernel it holds dO
anyway, so it also computes what both need for each query (rows.py) and leaves it there: a kernel for that alone would
read dO once more. In one launch with the dK, dV kernel (dq_dkdv.py) it finds it there (HAS_ROWS).
"""

import triton
import triton.language as tl

from .launch import NOT_SPECIALISED
from .rows import row_terms
from .scores import head_options, kept, load_bias, logits, with_slope
from .tiles import CAREFUL_BLOCK, has_nan, is_finite, key_position, load_tile, query_rows, sees, store_tile
from .traversal import key_pieces, listed_block, position_of_step, steps


@triton.jit
def _queries_loop(
    dq,
    q,
    dout,
    lse2,
    delta,
    rows,
    keys,
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
    """Add what the masked (or the unmasked) key tiles give to dQ (unscaled)."""
    k_base, stride_ks, v_base, stride_vs, positions, list_ptr = keys
    block = listed_block(0, pieces, list_ptr, MASKED, CAREFUL, F, TILES)
    # A band's masked loop is short: filling its pipeline costs more time, and registers, than it saves.
    for i in tl.range(
        0,
        steps(pieces, MASKED, CAREFUL, BLOCK_K // STEP),
        num_stages=1 if MASKED and (CAREFUL or not F.intervals) else None,
    ):
        first_key = position_of_step(i, block, pieces, list_ptr, MASKED, CAREFUL, F, TILES, BLOCK_K, STEP)
        block = listed_block(i + 1, pieces, list_ptr, MASKED, CAREFUL, F, TILES)
        offset = tl.cast(first_key, tl.int64)
        left = bounds[1] - first_key
        k = load_tile(k_base + offset * stride_ks, stride_ks, left, MASKED, STEP, HEAD_DIM, BLOCK_D)
        v = load_tile(v_base + offset * stride_vs, stride_vs, left, MASKED, STEP, HEAD_DIM, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        key = first_key + tl.arange(0, STEP)[None, :]
        position = key_position(positions, key, bounds[1], F)
        if F.softcap or F.alibi or F.bias:
            scores, capped = logits(scores, head, rows, key, first_key, position, bounds, F)
            p = tl.exp2(scores - lse2[:, None])
        else:
            p = tl.exp2(scores * head[0] - lse2[:, None])
        if MASKED:
            mask = sees(rows, key, position, bounds, True, F)
            if CAREFUL and F.bias:
                mask = mask & (load_bias(head, rows, key, bounds) != float("-inf"))
            p = tl.where(mask, p, 0.0)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        if F.dropout:
            dp = tl.where(kept(head, rows, first_key, position, False, F, BLOCK_Q, STEP), dp * keep_scale, 0.0)
        ds = p * (dp - delta[:, None])
        if F.softcap:
            ds *= 1.0 - capped * capped
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
    HAS_DLSE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    F: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = tl.cdiv(seqlen_q, BLOCK_Q)
    tile = tl.program_id(0) % tiles
    head_index = tl.program_id(0) // tiles
    if F.right or F.intervals:  # longest first, as in the forward kernel
        tile = tiles - 1 - tile
    batch = (head_index // heads).to(tl.int64)
    head = (head_index % heads).to(tl.int64)
    first_query = tile * BLOCK_Q
    query = first_query + tl.arange(0, BLOCK_Q)
    offset = tl.cast(first_query, tl.int64)
    left = seqlen_q - first_query
    bounds = (seqlen_q, seqlen_k, band_left, band_right)
    keys = (
        k_ptr + batch * stride_kb + (head // GROUP) * stride_kh, stride_ks,
        v_ptr + batch * stride_vb + (head // GROUP) * stride_vh, stride_vs,
        positions_ptr + batch * stride_positions, list_ptr,
    )  # fmt: skip
    options = head_options(
        head, scale_log2, cap_in, cap_log2, slopes_ptr, stride_slopes, bias_ptr + batch * stride_bb + head * stride_bh,
        stride_bq, stride_bk, seed_ptr, threshold, F,
    )  # fmt: skip
    row = query_rows(query[:, None], batch, bounds, mask_ptr + batch * stride_mask, mask_plane, F)
    row = with_slope(row, options, F)
    pieces = key_pieces(
        first_query, bounds, table_ptr + batch * stride_tb + head * stride_th, stride_tr, F, BLOCK_Q, BLOCK_K
    )
    q_base = q_ptr + batch * stride_qb + head * stride_qh + offset * stride_qs
    dout_base = dout_ptr + batch * stride_gb + head * stride_gh + offset * stride_gs
    q = load_tile(q_base, stride_qs, left, True, BLOCK_Q, HEAD_DIM, BLOCK_D)
    dout = load_tile(dout_base, stride_gs, left, True, BLOCK_Q, HEAD_DIM, BLOCK_D)
    rows = tl.cast(head_index, tl.int64) * seqlen_q + query
    if HAS_ROWS:
        lse2 = tl.load(lse2_ptr + rows, mask=query < seqlen_q, other=float("inf"))
        delta = tl.load(delta_ptr + rows, mask=query < seqlen_q, other=0.0)
    else:
        out_base = out_ptr + batch * stride_ob + head * stride_oh + offset * stride_os
        out = load_tile(out_base, stride_os, left, True, BLOCK_Q, HEAD_DIM, BLOCK_D)
        lse2, delta = row_terms(out, dout, lse_ptr + rows, dlse_ptr + rows, query < seqlen_q, HAS_DLSE)
        tl.store(lse2_ptr + rows, lse2, mask=query < seqlen_q)
        tl.store(delta_ptr + rows, delta, mask=query < seqlen_q)

    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for MASKED in tl.static_range(2):
        dq = _queries_loop(
            dq, q, dout, lse2, delta, row, keys, bounds, pieces, options, keep_scale, MASKED == 1, False, F, TILES,
            HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, BLOCK_K, PRECISION,
        )  # fmt: skip
    if F.left or F.right or F.intervals or F.block_q or F.bias:  # noqa: SIM102 - decided while compiling; while running
        if has_nan(dq):  # rare: see the forward kernel
            dq = _queries_loop(
                tl.zeros([BLOCK_Q, BLOCK_D], tl.float32), q, dout, lse2, delta, row, keys, bounds, pieces, options,
                keep_scale, True, True, F, TILES, HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, CAREFUL_BLOCK, PRECISION,
            )  # fmt: skip
    dq_base = dq_ptr + batch * stride_dqb + head * stride_dqh + offset * stride_dqs
    store_tile(dq_base, stride_dqs, left, dq * scale, BLOCK_Q, HEAD_DIM, BLOCK_D)
