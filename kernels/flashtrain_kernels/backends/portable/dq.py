"""The kernel of dQ: one program computes C.block_q queries, in a loop over the keys that they see.

Sq queries, Sk keys, H query heads, K key/value heads, D head dimension. F: launch.Features. C:
launch.Tiling. delta = rowsum(dO * O) - dLSE (FlashAttention-2, arXiv 2307.08691, algorithm 2, with
the gradient of the log-sum-exp).
"""

import triton
import triton.language as tl

from .launch import NOT_SPECIALISED, Arguments, Table
from .query_tile import query_tile, seen_keys
from .tiles import (
    RECOMPUTE_BLOCK,
    Strided,
    has_nan,
    is_finite,
    kept,
    key_position,
    load_bias,
    load_own_tile,
    load_tile,
    logits,
    outer,
    sees,
    store_tile,
)
from .traversal import listed_block, position_of_step, steps

# The dQ kernel holds dO anyway: launched before the dK, dV kernel it computes row_terms on the way
# and stores them; in one launch with it (HAS_ROWS) it finds them, from rows_kernel.
# Rows a program of rows_kernel, chosen for the memory system: each is one contiguous
# piece of O and of dO.
ROWS = 64


@triton.jit
def row_terms(out, dout, lse, dlse, inside, HAS_DLSE: tl.constexpr):
    """Return (base-2 log-sum-exp, delta), float32, of a tile of queries; the former is inf where a
    query sees no key. out, dout: tiles; lse, dlse: pointers for each query; inside: which queries
    exist; HAS_DLSE: dLSE is given."""
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse, mask=inside, other=0.0)
    lse2 = tl.load(lse, mask=inside, other=float("inf")) * 1.4426950408889634
    # A row that saw nothing has no probabilities: exp2(x - inf) is 0 for whatever scores
    # its masked pairs have.
    return tl.where(lse2 == float("-inf"), float("inf"), lse2), delta


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def rows_kernel(
    dout_ptr, out_ptr, lse_ptr, dlse_ptr, lse2_ptr, delta_ptr, dout_strides, out_strides, heads,
    seqlen_q,
    HAS_DLSE: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Kernel: one program fills lse2 and delta (see row_terms), (B, H, Sq) float32, for
    BLOCK_Q queries of a head."""
    dout = Strided(dout_ptr, *dout_strides)
    out = Strided(out_ptr, *out_strides)
    tiles = tl.cdiv(seqlen_q, BLOCK_Q)
    first_query = (tl.program_id(0) % tiles) * BLOCK_Q
    head_index = tl.program_id(0) // tiles
    batch = (head_index // heads).to(tl.int64)
    head = (head_index % heads).to(tl.int64)
    query = first_query + tl.arange(0, BLOCK_Q)
    offset = tl.cast(first_query, tl.int64)
    left = seqlen_q - first_query
    dout_base = dout.pointer + batch * dout.batch + head * dout.head + offset * dout.row
    out_base = out.pointer + batch * out.batch + head * out.head + offset * out.row
    dout_tile = load_tile(dout_base, dout.row, left, True, BLOCK_Q, VALUE_DIM, BLOCK_V)
    out_tile = load_tile(out_base, out.row, left, True, BLOCK_Q, VALUE_DIM, BLOCK_V)
    rows = tl.cast(head_index, tl.int64) * seqlen_q + query
    lse2, delta = row_terms(
        out_tile, dout_tile, lse_ptr + rows, dlse_ptr + rows, query < seqlen_q, HAS_DLSE
    )
    tl.store(lse2_ptr + rows, lse2, mask=query < seqlen_q)
    tl.store(delta_ptr + rows, delta, mask=query < seqlen_q)


@triton.jit
def _queries_loop(
    dq, q, dout, lse2, delta, rows, keys, bounds, pieces, head, keep_scale, MASKED: tl.constexpr,
    RECOMPUTE: tl.constexpr, F: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Add what the masked (or the unmasked) key tiles give to dQ (unscaled)."""
    block = listed_block(0, pieces, keys.blocks, MASKED, RECOMPUTE, F, C.tiles)
    # A band's masked loop is short: filling its pipeline costs more time, and
    # registers, than it saves.
    for i in tl.range(
        0,
        steps(pieces, MASKED, RECOMPUTE, C.block_k // STEP),
        num_stages=1 if MASKED and (RECOMPUTE or not F.intervals) else None,
    ):
        first_key = position_of_step(
            i, block, pieces, keys.blocks, MASKED, RECOMPUTE, F, C.tiles, C.block_k, STEP
        )
        block = listed_block(i + 1, pieces, keys.blocks, MASKED, RECOMPUTE, F, C.tiles)
        offset = tl.cast(first_key, tl.int64)
        left = bounds.seqlen_k - first_key
        v_base = keys.v + offset * keys.v_row
        if C.apart:  # first, so that k can have its place in shared memory
            v = load_tile(v_base, keys.v_row, left, MASKED, STEP, C.value_dim, C.block_v)
            dp = outer(dout, v, left, C)
        k = load_tile(
            keys.k + offset * keys.k_row, keys.k_row, left, MASKED, STEP, C.head_dim, C.block_d
        )
        if not C.apart:
            v = load_tile(v_base, keys.v_row, left, MASKED, STEP, C.value_dim, C.block_v)
        scores = outer(q, k, left, C)
        key = first_key + tl.arange(0, STEP)[None, :]
        position = key_position(keys.positions, key, bounds.seqlen_k, F)
        if F.softcap or F.alibi or F.bias:
            scores, capped = logits(scores, head, rows, key, first_key, position, bounds, F)
            p = tl.exp2(scores - lse2[:, None])
        else:
            p = tl.exp2(scores * head.scale_log2 - lse2[:, None])
        if MASKED:
            mask = sees(rows, key, position, bounds, True, F)
            if RECOMPUTE and F.bias:
                mask = mask & (load_bias(head, rows, key, bounds) != float("-inf"))
            p = tl.where(mask, p, 0.0)
        if not C.apart:
            dp = outer(dout, v, left, C)
        if F.dropout:
            dp = tl.where(
                kept(head, rows, first_key, position, False, F, C.block_q, STEP),
                dp * keep_scale,
                0.0,
            )
        ds = p * (dp - delta[:, None])
        if F.softcap:
            ds *= 1.0 - capped * capped
        if RECOMPUTE:
            ds = tl.where(mask, ds, 0.0)
            k = tl.where(is_finite(k), k, 0.0).to(k.dtype)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=C.precision)
    return dq


@triton.jit
def compute_dq(
    q, k, v, dout, out, lse_ptr, dlse_ptr, lse2_ptr, delta_ptr, dq, scale, call, table,
    HAS_DLSE: tl.constexpr,
    HAS_ROWS: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute and store one program's tile of dQ. HAS_ROWS: load lse2 and delta (see row_terms),
    else compute them from out, lse and dlse and store them. q, k, v, dout, out, dq: Strided;
    call: launch.Arguments."""
    BLOCK_Q: tl.constexpr = C.block_q
    BLOCK_K: tl.constexpr = C.block_k
    BLOCK_D: tl.constexpr = C.block_d
    head_index, batch, head, first_query, offset, query = query_tile(call, F, C)
    left = call.seqlen_q - first_query
    bounds, keys, options, row, pieces = seen_keys(
        batch, head, first_query, query, k, v, call, table, F, C
    )
    q_base = q.pointer + batch * q.batch + head * q.head + offset * q.row
    dout_base = dout.pointer + batch * dout.batch + head * dout.head + offset * dout.row
    if C.apart:  # registers are scarce: see load_own_tile
        q_tile = load_own_tile(q_base, q.row, left, BLOCK_Q, C.head_dim, BLOCK_D)
        dout_tile = load_own_tile(dout_base, dout.row, left, BLOCK_Q, C.value_dim, C.block_v)
    else:
        q_tile = load_tile(q_base, q.row, left, True, BLOCK_Q, C.head_dim, BLOCK_D)
        dout_tile = load_tile(dout_base, dout.row, left, True, BLOCK_Q, C.value_dim, C.block_v)
    rows = tl.cast(head_index, tl.int64) * call.seqlen_q + query
    if HAS_ROWS:
        lse2 = tl.load(lse2_ptr + rows, mask=query < call.seqlen_q, other=float("inf"))
        delta = tl.load(delta_ptr + rows, mask=query < call.seqlen_q, other=0.0)
    else:
        out_base = out.pointer + batch * out.batch + head * out.head + offset * out.row
        out_tile = load_tile(out_base, out.row, left, True, BLOCK_Q, C.value_dim, C.block_v)
        lse2, delta = row_terms(
            out_tile, dout_tile, lse_ptr + rows, dlse_ptr + rows, query < call.seqlen_q, HAS_DLSE
        )
        tl.store(lse2_ptr + rows, lse2, mask=query < call.seqlen_q)
        tl.store(delta_ptr + rows, delta, mask=query < call.seqlen_q)

    total = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for MASKED in tl.static_range(2):
        total = _queries_loop(
            total, q_tile, dout_tile, lse2, delta, row, keys, bounds, pieces, options,
            call.keep_scale, MASKED == 1,
            False, F, C, BLOCK_K,
        )  # fmt: skip
    if F.left or F.right or F.intervals or F.block_q or F.bias:  # noqa: SIM102 - decided while compiling; while running
        if has_nan(total):  # rare: see the forward kernel
            total = _queries_loop(
                tl.zeros([BLOCK_Q, BLOCK_D], tl.float32), q_tile, dout_tile, lse2, delta, row, keys,
                bounds, pieces,
                options, call.keep_scale, True, True, F, C, RECOMPUTE_BLOCK,
            )  # fmt: skip
    dq_base = dq.pointer + batch * dq.batch + head * dq.head + offset * dq.row
    store_tile(dq_base, dq.row, left, total * scale, BLOCK_Q, C.head_dim, BLOCK_D)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, out_ptr, lse_ptr, dlse_ptr, lse2_ptr, delta_ptr, dq_ptr,
    q_strides, k_strides,
    v_strides, dout_strides, out_strides, dq_strides, scale,
    bias, bias_batch, bias_head, bias_q, bias_k, slopes, slope_row, seed, intervals, plane,
    interval_batch, positions,
    position_batch, table_rows, table_batch, table_head, table_row, blocks, heads, seqlen_q,
    seqlen_k, left, right,
    scale_log2, cap_in, cap_log2, threshold, keep_scale,
    HAS_DLSE: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Kernel: one program computes dQ, lse2 and delta of C.block_q queries. Arguments: see
    dkdv_kernel, row_terms."""
    call = Arguments(
        bias, bias_batch, bias_head, bias_q, bias_k, slopes, slope_row, seed, intervals, plane,
        interval_batch,
        positions, position_batch, heads, seqlen_q, seqlen_k, left, right, scale_log2, cap_in,
        cap_log2, threshold,
        keep_scale,
    )  # fmt: skip
    table = Table(table_rows, table_batch, table_head, table_row, blocks)
    compute_dq(
        Strided(q_ptr, *q_strides), Strided(k_ptr, *k_strides), Strided(v_ptr, *v_strides),
        Strided(dout_ptr, *dout_strides), Strided(out_ptr, *out_strides), lse_ptr, dlse_ptr,
        lse2_ptr, delta_ptr,
        Strided(dq_ptr, *dq_strides), scale, call, table, HAS_DLSE, False, F, C,
    )  # fmt: skip
