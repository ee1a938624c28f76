"""Tiles of gradients computed again because a NaN came out: slow, and rare. See the portable kernels' careful pass.

In the fused kernel a masked pair's weight is 0, and 0 times NaN or inf is NaN. Here masked pairs stay out altogether,
and visible values that are not finite give NaN.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension. F: portable.launch.Features.
"""

import triton
import triton.language as tl

from ..portable.tiles import is_finite, key_position, query_rows, sees

ROWS = tl.constexpr(64)
STEP = tl.constexpr(16)


@triton.jit
def _load(base, stride_row, row, limit, D: tl.constexpr):
    """Rows of a (., D) matrix; those from `limit` on read as zero."""
    column = tl.arange(0, D)
    pointers = base + row.to(tl.int64)[:, None] * stride_row + column[None, :]
    return tl.load(pointers, mask=row[:, None] < limit, other=0.0)


@triton.jit
def _steps(row_ptr, length, BLOCK: tl.constexpr):
    """How many steps visit everything that may be visible: all of it, or what a row of a block list names."""
    if BLOCK:
        count = ((tl.load(row_ptr + 2) - tl.load(row_ptr)) * (BLOCK // STEP)).to(tl.int32)
    else:
        count = (length + STEP - 1) // STEP
    return count


@triton.jit
def _position(i, row_ptr, list_ptr, BLOCK: tl.constexpr):
    """The first position of step i."""
    if BLOCK:
        PER: tl.constexpr = BLOCK // STEP
        position = tl.load(list_ptr + tl.load(row_ptr) + i // PER) * BLOCK + (i % PER) * STEP
    else:
        position = i * STEP
    return position


@triton.jit
def queries_again(first_query, head_index, call, D: tl.constexpr, GROUP: tl.constexpr, F: tl.constexpr):
    """dQ (unscaled) of 64 queries."""
    (
        q_ptr, q_strides, k_ptr, k_strides, v_ptr, v_strides, do_ptr, do_strides, rows_ptr, heads, bounds, scale_log2,
        query_tiles, mask_ptr, plane, stride_mask, positions_ptr, stride_positions, row_ptr, stride_b, stride_h,
        stride_r, list_ptr,
    ) = call  # fmt: skip
    batch = (head_index // heads).to(tl.int64)
    head = (head_index % heads).to(tl.int64)
    query = first_query + tl.arange(0, ROWS)
    place = (head_index.to(tl.int64) * query_tiles + first_query // ROWS) * (2 * ROWS)
    lse2 = tl.load(rows_ptr + place + tl.arange(0, ROWS))
    delta = tl.load(rows_ptr + place + ROWS + tl.arange(0, ROWS))
    q = _load(q_ptr + batch * q_strides[0] + head * q_strides[2], q_strides[1], query, bounds[0], D)
    do = _load(do_ptr + batch * do_strides[0] + head * do_strides[2], do_strides[1], query, bounds[0], D)
    row = query_rows(query[:, None], batch, bounds, mask_ptr + batch * stride_mask, plane, F)
    row_ptr += batch * stride_b + head * stride_h
    if F.block_q:
        row_ptr += (first_query // F.block_q) * stride_r
    dq = tl.zeros([ROWS, D], tl.float32)
    for i in tl.range(0, _steps(row_ptr, bounds[1], F.block_k), num_stages=1):
        key = _position(i, row_ptr, list_ptr, F.block_k) + tl.arange(0, STEP)
        k = _load(k_ptr + batch * k_strides[0] + (head // GROUP) * k_strides[2], k_strides[1], key, bounds[1], D)
        v = _load(v_ptr + batch * v_strides[0] + (head // GROUP) * v_strides[2], v_strides[1], key, bounds[1], D)
        position = key_position(positions_ptr + batch * stride_positions, key[None, :], bounds[1], F)
        mask = sees(row, key[None, :], position, bounds, True, F)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - lse2[:, None])
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        ds = tl.where(mask, ds, 0.0)
        k = tl.where(is_finite(k), k, 0.0).to(k.dtype)
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit
def keys_again(first_key, batch, kv_head, call, D: tl.constexpr, GROUP: tl.constexpr, F: tl.constexpr):
    """dK (unscaled) and dV of 64 keys."""
    (
        q_ptr, q_strides, k_ptr, k_strides, v_ptr, v_strides, do_ptr, do_strides, rows_ptr, heads, bounds, scale_log2,
        query_tiles, mask_ptr, plane, stride_mask, positions_ptr, stride_positions, row_ptr, stride_b, stride_h,
        stride_r, list_ptr,
    ) = call  # fmt: skip
    key = first_key + tl.arange(0, ROWS)
    k = _load(k_ptr + batch * k_strides[0] + kv_head * k_strides[2], k_strides[1], key, bounds[1], D)
    v = _load(v_ptr + batch * v_strides[0] + kv_head * v_strides[2], v_strides[1], key, bounds[1], D)
    position = key_position(positions_ptr + batch * stride_positions, key[:, None], bounds[1], F)
    dk = tl.zeros([ROWS, D], tl.float32)
    dv = tl.zeros([ROWS, D], tl.float32)
    for member in tl.range(0, GROUP, num_stages=1):
        head = kv_head * GROUP + member
        block_row = row_ptr + batch * stride_b + head * stride_h
        if F.block_q:
            block_row += (first_key // F.block_k) * stride_r
        for i in tl.range(0, _steps(block_row, bounds[0], F.block_q), num_stages=1):
            query = _position(i, block_row, list_ptr, F.block_q) + tl.arange(0, STEP)
            place = (batch * heads + head) * query_tiles * (2 * ROWS)
            place += (query // ROWS) * (2 * ROWS) + query % ROWS
            lse2 = tl.load(rows_ptr + place)
            delta = tl.load(rows_ptr + place + ROWS)
            q = _load(q_ptr + batch * q_strides[0] + head * q_strides[2], q_strides[1], query, bounds[0], D)
            do = _load(do_ptr + batch * do_strides[0] + head * do_strides[2], do_strides[1], query, bounds[0], D)
            row = query_rows(query[None, :], batch, bounds, mask_ptr + batch * stride_mask, plane, F)
            mask = sees(row, key[:, None], position, bounds, True, F) & (query < bounds[0])[None, :]
            p = tl.where(mask, tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse2[None, :]), 0.0)
            ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
            ds = tl.where(mask, ds, 0.0)
            # A visible NaN or inf of dO shows in delta, and reaches the keys it belongs to.
            p = tl.where(mask & (is_finite(delta)[None, :] == 0), float("nan"), p)
            q = tl.where(is_finite(q), q, 0.0).to(q.dtype)
            do = tl.where(is_finite(do), do, 0.0).to(do.dtype)
            dv = tl.dot(p.to(do.dtype), do, dv)
            dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv
