"""The kernel of dK and dV: one program computes C.block_k keys of a key/value head, in a loop
over all their queries.

Sq queries, Sk keys, H query heads, K key/value heads, D head dimension. F: launch.Features. C:
launch.Tiling. Scores are transposed, S^T = K Q^T, so that P^T and dS^T are left operands, in
registers, of the products for dV and dK.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .launch import NOT_SPECIALISED, Arguments, Table
from .tiles import (
    RECOMPUTE_BLOCK,
    Strided,
    bounds_of,
    has_nan,
    head_options,
    is_finite,
    kept,
    key_position,
    load_bias,
    load_own_tile,
    load_tile,
    logits,
    outer,
    query_rows,
    sees,
    store_tile,
    with_slope,
)
from .traversal import listed_block, position_of_step, query_pieces, steps


class Own(NamedTuple):
    """The keys whose dK and dV one program computes: their tiles of k and v,
    indices and positions."""

    k: Any  # their tiles
    v: Any
    key: Any  # indices
    position: Any
    first: Any  # the first index
    batch: Any  # the batch row


class Queries(NamedTuple):
    """Pointers to the queries of one head, with strides, for the loop over tiles of queries."""

    q: Any  # pointers, and strides by row
    q_row: Any
    dout: Any
    dout_row: Any
    lse2: Any  # pointers to what dq.row_terms gives
    delta: Any


@triton.jit
def _keys_loop(
    dk, dv, own, queries, bounds, pieces, intervals, head, call, table, MASKED: tl.constexpr,
    RECOMPUTE: tl.constexpr, F: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Add what the masked (or the unmasked) query tiles of one head give to
    dK (unscaled) and dV."""
    block = listed_block(0, pieces, table.blocks, MASKED, RECOMPUTE, F, C.tiles)
    # A band's masked loop is short: filling its pipeline costs more time, and
    # registers, than it saves.
    for i in tl.range(
        0,
        steps(pieces, MASKED, RECOMPUTE, C.block_q // STEP),
        num_stages=1 if MASKED and (RECOMPUTE or not F.intervals) else None,
    ):
        first_query = position_of_step(
            i, block, pieces, table.blocks, MASKED, RECOMPUTE, F, C.tiles, C.block_q, STEP
        )
        block = listed_block(i + 1, pieces, table.blocks, MASKED, RECOMPUTE, F, C.tiles)
        left = bounds.seqlen_q - first_query
        offset = tl.cast(first_query, tl.int64)
        row = tl.arange(0, STEP)
        dout_base = queries.dout + offset * queries.dout_row
        EARLY: tl.constexpr = C.apart and C.gradient == "dk"
        if EARLY:  # dO first, so that q can have its place in shared memory
            dout = load_tile(
                dout_base, queries.dout_row, left, MASKED, STEP, C.value_dim, C.block_v
            )
            dp = outer(own.v, dout, left, C)
        q = load_tile(
            queries.q + offset * queries.q_row,
            queries.q_row,
            left,
            MASKED,
            STEP,
            C.head_dim,
            C.block_d,
        )
        if MASKED:
            lse2 = tl.load(queries.lse2 + first_query + row, mask=row < left, other=float("inf"))
        else:
            lse2 = tl.load(queries.lse2 + first_query + row)
        products = outer(own.k, q, left, C)
        if MASKED or F.alibi or F.bias or F.dropout:
            rows = query_rows(
                first_query + row[None, :], own.batch, bounds, intervals, call.plane, F
            )
            rows = with_slope(rows, head, F)
        else:
            rows = head  # nothing of it is read
        if F.softcap or F.alibi or F.bias:
            products, capped = logits(
                products, head, rows, own.key, own.first, own.position, bounds, F
            )
            p = tl.exp2(products - lse2[None, :])
        else:
            p = tl.exp2(products * head.scale_log2 - lse2[None, :])
        if MASKED:
            mask = sees(rows, own.key, own.position, bounds, False, F)
            if RECOMPUTE:  # rows past Sq count here: their weight is 0, but 0 * NaN is NaN
                mask = mask & (rows.query < bounds.seqlen_q)
            if RECOMPUTE and F.bias:
                mask = mask & (load_bias(head, rows, own.key, bounds) != float("-inf"))
            p = tl.where(mask, p, 0.0)
        if not EARLY:
            dout = load_tile(
                dout_base, queries.dout_row, left, MASKED, STEP, C.value_dim, C.block_v
            )
        if MASKED:
            delta = tl.load(queries.delta + first_query + row, mask=row < left, other=0.0)
        else:
            delta = tl.load(queries.delta + first_query + row)
        if F.dropout:
            keep = kept(head, rows, own.first, own.position, True, F, STEP, C.block_k)
        if C.gradient != "dv":
            if not EARLY:
                dp = outer(own.v, dout, left, C)
            if F.dropout:
                dp = tl.where(keep, dp * call.keep_scale, 0.0)
            ds = p * (dp - delta[None, :])
            if F.softcap:
                ds *= 1.0 - capped * capped
            if RECOMPUTE:
                ds = tl.where(mask, ds, 0.0)
                q = tl.where(is_finite(q), q, 0.0).to(q.dtype)
        if F.dropout:
            p = tl.where(keep, p, 0.0)
        if RECOMPUTE:
            # Masked pairs give nothing; a visible NaN or inf of dO shows in delta, and reaches the
            # keys it belongs to.
            p = tl.where(mask & (is_finite(delta)[None, :] == 0), float("nan"), p)
            dout = tl.where(is_finite(dout), dout, 0.0).to(dout.dtype)
        if C.gradient != "dk":
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=C.precision)
        if C.gradient != "dv":
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=C.precision)
    return dk, dv


@triton.jit
def _add_heads(
    dk, dv, own, queries, q_head, dout_head, first_head, row, intervals, bias, table_base, bounds,
    call, table,
    MASKED: tl.constexpr, RECOMPUTE: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv what the queries of all heads of the group give, and return them. queries:
    of the first head, but lse2 and delta before `row`, its offset, is added; q_head, dout_head:
    strides between heads; intervals, bias, table_base: pointers for the batch row."""
    q_base = queries.q
    dout_base = queries.dout
    # Pointers are moved on from head to head: computed anew, their parts would stay in
    # registers all along.
    for member in tl.range(0, C.group, num_stages=1):
        head = first_head + member
        table_row = table_base + head * table.head
        pieces = query_pieces(own.first, bounds, table_row, table.row, F, C.block_q, C.block_k)
        here = Queries(
            q_base, queries.q_row, dout_base, queries.dout_row, queries.lse2 + row,
            queries.delta + row
        )  # fmt: skip
        options = head_options(head, bias + head * call.bias_head, call, F)
        dk, dv = _keys_loop(
            dk,
            dv,
            own,
            here,
            bounds,
            pieces,
            intervals,
            options,
            call,
            table,
            MASKED,
            RECOMPUTE,
            F,
            C,
            STEP,
        )
        q_base += q_head
        dout_base += dout_head
        row += bounds.seqlen_q
    return dk, dv


@triton.jit
def compute_dkdv(
    q, k, v, dout, lse2_ptr, delta_ptr, dk, dv, scale, call, table, F: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Compute and store one program's tiles of dK and dV. q, k, v, dout, dk, dv: Strided;
    others: see dkdv_kernel."""
    BLOCK_Q: tl.constexpr = C.block_q
    BLOCK_K: tl.constexpr = C.block_k
    BLOCK_D: tl.constexpr = C.block_d
    BLOCK_V: tl.constexpr = C.block_v
    # Of a tile that is not computed, one column.
    DK: tl.constexpr = 1 if C.gradient == "dv" else C.block_d
    DV: tl.constexpr = 1 if C.gradient == "dk" else C.block_v
    # Under a causal mask the first keys are seen by the most queries, so the natural order is
    # already longest first.
    tiles = tl.cdiv(call.seqlen_k, BLOCK_K)
    first_key = (tl.program_id(0) % tiles) * BLOCK_K
    head_index = tl.program_id(0) // tiles
    kv_heads = call.heads // C.group
    batch = (head_index // kv_heads).to(tl.int64)
    kv_head = (head_index % kv_heads).to(tl.int64)
    key = first_key + tl.arange(0, BLOCK_K)[:, None]
    offset = tl.cast(first_key, tl.int64)
    left = call.seqlen_k - first_key
    bounds = bounds_of(call)
    position = key_position(call.positions + batch * call.position_batch, key, call.seqlen_k, F)
    k_base = k.pointer + batch * k.batch + kv_head * k.head + offset * k.row
    v_base = v.pointer + batch * v.batch + kv_head * v.head + offset * v.row
    k_tile = load_own_tile(k_base, k.row, left, BLOCK_K, C.head_dim, BLOCK_D)
    v_tile = k_tile
    if C.gradient != "dv":
        v_tile = load_own_tile(v_base, v.row, left, BLOCK_K, C.value_dim, BLOCK_V)
    own = Own(k_tile, v_tile, key, position, first_key, batch)

    dk_tile = tl.zeros([BLOCK_K, DK], tl.float32)
    dv_tile = tl.zeros([BLOCK_K, DV], tl.float32)
    first_head = kv_head * C.group
    row = (batch * call.heads + first_head) * call.seqlen_q
    queries = Queries(
        q.pointer + batch * q.batch + first_head * q.head, q.row,
        dout.pointer + batch * dout.batch + first_head * dout.head, dout.row, lse2_ptr, delta_ptr,
    )  # fmt: skip
    intervals = call.intervals + batch * call.interval_batch
    table_base = table.rows + batch * table.batch
    bias = call.bias + batch * call.bias_batch
    # All heads' full tiles, then all heads' masked ones: the registers of the two loops are then
    # never alive at once.
    for MASKED in tl.static_range(2):
        dk_tile, dv_tile = _add_heads(
            dk_tile, dv_tile, own, queries, q.head, dout.head, first_head, row, intervals, bias,
            table_base, bounds,
            call, table, MASKED == 1, False, F, C, BLOCK_Q,
        )  # fmt: skip
    if F.left or F.right or F.intervals or F.block_q or F.bias:  # noqa: SIM102 - decided while compiling; while running
        if has_nan(dk_tile) | has_nan(dv_tile):  # rare: see the forward kernel
            dk_tile = tl.zeros([BLOCK_K, DK], tl.float32)
            dv_tile = tl.zeros([BLOCK_K, DV], tl.float32)
            dk_tile, dv_tile = _add_heads(
                dk_tile, dv_tile, own, queries, q.head, dout.head, first_head, row, intervals, bias,
                table_base, bounds,
                call, table, True, True, F, C, RECOMPUTE_BLOCK,
            )  # fmt: skip

    dk_base = dk.pointer + batch * dk.batch + kv_head * dk.head + offset * dk.row
    dv_base = dv.pointer + batch * dv.batch + kv_head * dv.head + offset * dv.row
    if C.gradient != "dv":
        store_tile(dk_base, dk.row, left, dk_tile * scale, BLOCK_K, C.head_dim, BLOCK_D)
    if C.gradient != "dk":
        if F.dropout:
            dv_tile = dv_tile * call.keep_scale
        store_tile(dv_base, dv.row, left, dv_tile, BLOCK_K, C.value_dim, BLOCK_V)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr, q_strides, k_strides,
    v_strides, dout_strides,
    dk_strides, dv_strides, scale,
    bias, bias_batch, bias_head, bias_q, bias_k, slopes, slope_row, seed, intervals, plane,
    interval_batch, positions,
    position_batch, table_rows, table_batch, table_head, table_row, blocks, heads, seqlen_q,
    seqlen_k, left, right,
    scale_log2, cap_in, cap_log2, threshold, keep_scale,
    F: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Kernel: one program computes dK and dV of C.block_k keys of one key/value head.

    *_ptr, *_strides: tensors, and their strides by batch, row, head; lse2_ptr, delta_ptr: from
    dq.row_terms; scale: the softmax's. bias to position_batch and heads to keep_scale are
    launch.Arguments: bias, ALiBi slopes, dropout's seed, Mask.queries (intervals) and Mask.keys
    (positions), with strides; sizes; the band; factors for scores and dropout. table_* and blocks
    are a launch.Table: the tiles to visit.
    """
    call = Arguments(
        bias, bias_batch, bias_head, bias_q, bias_k, slopes, slope_row, seed, intervals, plane,
        interval_batch,
        positions, position_batch, heads, seqlen_q, seqlen_k, left, right, scale_log2, cap_in,
        cap_log2, threshold,
        keep_scale,
    )  # fmt: skip
    table = Table(table_rows, table_batch, table_head, table_row, blocks)
    compute_dkdv(
        Strided(q_ptr, *q_strides), Strided(k_ptr, *k_strides), Strided(v_ptr, *v_strides),
        Strided(dout_ptr, *dout_strides), lse2_ptr, delta_ptr, Strided(dk_ptr, *dk_strides),
        Strided(dv_ptr, *dv_strides), scale, call, table, F, C,
    )  # fmt: skip
