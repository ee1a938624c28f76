"""Gradients of a tile recomputed without its masked pairs, because a NaN came out:
slow, and rarely needed.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension. F:
portable.launch.Features.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..portable.dropout_rng import kept_pairs, load_stream
from ..portable.tiles import is_finite, key_position, query_rows, sees, tanh

ROWS = tl.constexpr(64)
STEP = tl.constexpr(16)


class Inputs(NamedTuple):
    """The arguments that `queries_again` (dQ) and `keys_again` (dK and dV) share."""

    q: Any  # q, k, v and dout: Strided
    k: Any
    v: Any
    dout: Any
    rows: Any  # what backward_rows.py says of each query
    heads: Any
    bounds: Any
    scale_log2: Any  # softcap.scale_of
    query_tiles: Any
    mask: Any  # Mask.queries; with dropout the seed, with ALiBi the slopes
    plane: Any  # the stride of its rows
    stride_mask: Any  # that of its batch; with dropout the threshold, with ALiBi the slopes' stride
    positions: Any
    stride_positions: Any
    sequence: Any  # the number of a packed sequence, else 0


@triton.jit
def _load(x, batch, head, GROUP: tl.constexpr, row, limit, D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load rows `row` of a Strided tensor at batch row `batch` and head head // GROUP, padded to D
    columns; rows from `limit` on and columns from HEAD_DIM on are 0."""
    base = x.pointer + batch * x.batch + (head // GROUP) * x.head
    column = tl.arange(0, D)
    rows = base + row.to(tl.int64)[:, None] * x.row
    if HEAD_DIM < D:
        rows = tl.multiple_of(rows, [16, 16])  # bytes: see backward_rows.py
    pointers = rows + column[None, :]
    inside = row[:, None] < limit
    if HEAD_DIM < D:
        inside = inside & (column[None, :] < HEAD_DIM)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _leaning(head, sequence, call, distance, F: tl.constexpr):
    """Return what ALiBi subtracts from base-2 scores, 0 without it. distance: key positions minus
    query positions."""
    taken = 0.0
    if F.alibi:
        # Tokens past the last end of packed sequences are one sequence more, which has no slopes.
        row = tl.minimum(sequence, call.plane - 1) if call.plane > 0 else sequence
        slope = tl.load(call.mask + row * call.stride_mask + head) * 1.4426950408889634
        taken = slope * tl.abs(distance).to(tl.float32)
    return taken


@triton.jit
def _steps(row_ptr, length, BLOCK: tl.constexpr):
    """Return the number of loop steps, of STEP positions each, over all that may be visible: [0,
    length), or with BLOCK the blocks that the block list's row at row_ptr names."""
    if BLOCK:
        count = ((tl.load(row_ptr + 2) - tl.load(row_ptr)) * (BLOCK // STEP)).to(tl.int32)
    else:
        count = (length + STEP - 1) // STEP
    return count


@triton.jit
def _position(i, row_ptr, list_ptr, BLOCK: tl.constexpr):
    """Return the first position that step i of the loop visits (see _steps)."""
    if BLOCK:
        PER: tl.constexpr = BLOCK // STEP
        position = tl.load(list_ptr + tl.load(row_ptr) + i // PER) * BLOCK + (i % PER) * STEP
    else:
        position = i * STEP
    return position


@triton.jit
def _exponent(products, call, F: tl.constexpr):
    """Return (base-2 scores, softcap's derivative, 1 without softcap) from products q k^T."""
    slope = 1.0
    if F.softcap:
        capped = tanh(products * call.scale_log2[0])
        x = capped * call.scale_log2[8]
        slope = 1.0 - capped * capped
    else:
        x = products * call.scale_log2
    return x, slope


@triton.jit
def queries_again(
    first_query, head_index, call, table, D: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    F: tl.constexpr,
):  # fmt: skip
    """Recompute dQ of 64 queries from first_query on, not yet multiplied by the softmax scale and,
    with dropout, by 1 / (the probability of keeping a weight). head_index: b H + h, for batch row b
    and query head h; call: Inputs."""
    batch = (head_index // call.heads).to(tl.int64)
    head = (head_index % call.heads).to(tl.int64)
    query = first_query + tl.arange(0, ROWS)
    place = (head_index.to(tl.int64) * call.query_tiles + first_query // ROWS) * (2 * ROWS)
    lse2 = tl.load(call.rows + place + tl.arange(0, ROWS))
    delta = tl.load(call.rows + place + ROWS + tl.arange(0, ROWS))
    q = _load(call.q, batch, head, 1, query, call.bounds.seqlen_q, D, HEAD_DIM)
    do = _load(call.dout, batch, head, 1, query, call.bounds.seqlen_q, D, HEAD_DIM)
    row = query_rows(
        query[:, None], batch, call.bounds, call.mask + batch * call.stride_mask, call.plane, F
    )
    row_ptr = table.rows + (batch * table.batch + head * table.head)
    if F.block_q:
        row_ptr += (first_query // F.block_q) * table.row
    shift = call.bounds.seqlen_k - call.bounds.seqlen_q
    if F.dropout:
        stream = load_stream(call.mask, batch + call.sequence, head)
        share = (65536 - call.stride_mask).to(tl.float32) / 65536.0
        delta *= share
    dq = tl.zeros([ROWS, D], tl.float32)
    for i in tl.range(0, _steps(row_ptr, call.bounds.seqlen_k, F.block_k), num_stages=1):
        key = _position(i, row_ptr, table.blocks, F.block_k) + tl.arange(0, STEP)
        k = _load(call.k, batch, head, GROUP, key, call.bounds.seqlen_k, D, HEAD_DIM)
        v = _load(call.v, batch, head, GROUP, key, call.bounds.seqlen_k, D, HEAD_DIM)
        position = key_position(
            call.positions + batch * call.stride_positions, key[None, :], call.bounds.seqlen_k, F
        )
        mask = sees(row, key[None, :], position, call.bounds, True, F)
        x, slope = _exponent(tl.dot(q, tl.trans(k)), call, F)
        if F.alibi:
            x -= _leaning(
                head, batch + call.sequence, call, query[:, None] + shift - key[None, :], F
            )
        p = tl.exp2(x - lse2[:, None])
        dp = tl.dot(do, tl.trans(v))
        if F.dropout:  # dS times the share that is kept, as in the fused kernel
            keep = kept_pairs(stream, query[:, None] + shift, key[None, :], call.stride_mask)
            dp = tl.where(keep, dp, 0.0)
        ds = p * (dp - delta[:, None])
        if F.softcap:
            ds *= slope
        ds = tl.where(mask, ds, 0.0)
        k = tl.where(is_finite(k), k, 0.0).to(k.dtype)
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit
def keys_again(
    first_key, batch, kv_head, call, table, D: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    F: tl.constexpr,
):  # fmt: skip
    """Recompute (dK, dV) of 64 keys from first_key on; dK is not yet multiplied by the factors that
    `queries_again` leaves out."""
    key = first_key + tl.arange(0, ROWS)
    k = _load(call.k, batch, kv_head, 1, key, call.bounds.seqlen_k, D, HEAD_DIM)
    v = _load(call.v, batch, kv_head, 1, key, call.bounds.seqlen_k, D, HEAD_DIM)
    position = key_position(
        call.positions + batch * call.stride_positions, key[:, None], call.bounds.seqlen_k, F
    )
    shift = call.bounds.seqlen_k - call.bounds.seqlen_q
    dk = tl.zeros([ROWS, D], tl.float32)
    dv = tl.zeros([ROWS, D], tl.float32)
    for member in tl.range(0, GROUP, num_stages=1):
        head = kv_head * GROUP + member
        if F.dropout:
            stream = load_stream(call.mask, batch + call.sequence, head)
            share = (65536 - call.stride_mask).to(tl.float32) / 65536.0
        block_row = table.rows + batch * table.batch + head * table.head
        if F.block_q:
            block_row += (first_key // F.block_k) * table.row
        for i in tl.range(0, _steps(block_row, call.bounds.seqlen_q, F.block_q), num_stages=1):
            query = _position(i, block_row, table.blocks, F.block_q) + tl.arange(0, STEP)
            place = (batch * call.heads + head) * call.query_tiles * (2 * ROWS)
            place += (query // ROWS) * (2 * ROWS) + query % ROWS
            lse2 = tl.load(call.rows + place)
            delta = tl.load(call.rows + place + ROWS)
            q = _load(call.q, batch, head, 1, query, call.bounds.seqlen_q, D, HEAD_DIM)
            do = _load(call.dout, batch, head, 1, query, call.bounds.seqlen_q, D, HEAD_DIM)
            row = query_rows(
                query[None, :],
                batch,
                call.bounds,
                call.mask + batch * call.stride_mask,
                call.plane,
                F,
            )
            mask = (
                sees(row, key[:, None], position, call.bounds, True, F)
                & (query < call.bounds.seqlen_q)[None, :]
            )
            x, slope = _exponent(tl.dot(k, tl.trans(q)), call, F)
            if F.alibi:
                x -= _leaning(
                    head, batch + call.sequence, call, query[None, :] + shift - key[:, None], F
                )
            p = tl.where(mask, tl.exp2(x - lse2[None, :]), 0.0)
            dp = tl.dot(v, tl.trans(do))
            if F.dropout:
                keep = kept_pairs(stream, query[None, :] + shift, key[:, None], call.stride_mask)
                dp = tl.where(keep, dp, 0.0)
                ds = p * (dp - delta[None, :] * share)
                p = tl.where(keep, p / share, 0.0)
            else:
                ds = p * (dp - delta[None, :])
            if F.softcap:
                ds *= slope
            ds = tl.where(mask, ds, 0.0)
            # A visible NaN or inf of dO shows in delta, and reaches the keys it belongs to.
            p = tl.where(mask & (is_finite(delta)[None, :] == 0), float("nan"), p)
            q = tl.where(is_finite(q), q, 0.0).to(q.dtype)
            do = tl.where(is_finite(do), do, 0.0).to(do.dtype)
            dv = tl.dot(p.to(do.dtype), do, dv)
            dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv
