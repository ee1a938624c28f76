"""The kernel of the attention bias's gradient: the gradients of all scores to which a bias
element was added, summed.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ...masks import BlockMask
from .. import Call
from .launch import (
    NOT_SPECIALISED,
    Arguments,
    Launch,
    Table,
    arguments_of,
    broadcast_strides,
    ceil_div,
    features_of,
    strides_of,
    table_of,
    tiling_of,
)
from .tile_table import Tile
from .tiles import (
    Strided,
    bounds_of,
    head_options,
    kept,
    key_position,
    load_bias,
    load_tile,
    logits,
    query_rows,
    sees,
    with_slope,
)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def dbias_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dbias_ptr, q_strides, k_strides, v_strides,
    dout_strides,
    dbias_strides, batches, bias_batches, bias_heads,
    bias, bias_batch, bias_head, bias_q, bias_k, slopes, slope_row, seed, intervals, plane,
    interval_batch, positions,
    position_batch, table_rows, table_batch, table_head, table_row, blocks, heads, seqlen_q,
    seqlen_k, left, right,
    scale_log2, cap_in, cap_log2, threshold, keep_scale,
    EACH_QUERY: tl.constexpr, EACH_KEY: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Kernel: one program computes a tile of the bias's gradient. dbias_strides: by batch row,
    head, query, key; batches: B; bias_batches, bias_heads: the bias's first two sizes; EACH_QUERY,
    EACH_KEY: whether the bias has a number for each query, each key; table_*: BlockMask.blocks(), a
    byte for each block, with its strides. Others: see dkdv_kernel."""
    call = Arguments(
        bias, bias_batch, bias_head, bias_q, bias_k, slopes, slope_row, seed, intervals, plane,
        interval_batch,
        positions, position_batch, heads, seqlen_q, seqlen_k, left, right, scale_log2, cap_in,
        cap_log2, threshold,
        keep_scale,
    )  # fmt: skip
    table = Table(table_rows, table_batch, table_head, table_row, blocks)
    q = Strided(q_ptr, *q_strides)
    k = Strided(k_ptr, *k_strides)
    v = Strided(v_ptr, *v_strides)
    dout = Strided(dout_ptr, *dout_strides)
    BLOCK_Q: tl.constexpr = C.block_q
    BLOCK_K: tl.constexpr = C.block_k
    BLOCK_D: tl.constexpr = C.block_d
    query_tiles = tl.cdiv(call.seqlen_q, BLOCK_Q)
    key_tiles = tl.cdiv(call.seqlen_k, BLOCK_K)
    program = tl.program_id(0)
    first_key_tile = 0
    past_key_tile = key_tiles
    if EACH_KEY:
        first_key_tile = program % key_tiles
        past_key_tile = first_key_tile + 1
        program = program // key_tiles
    first_query_tile = 0
    past_query_tile = query_tiles
    if EACH_QUERY:
        first_query_tile = program % query_tiles
        past_query_tile = first_query_tile + 1
        program = program // query_tiles
    own_head = program % bias_heads
    own_batch = program // bias_heads
    first_head = tl.where(bias_heads == 1, 0, own_head)
    past_head = tl.where(bias_heads == 1, call.heads, own_head + 1)
    first_batch = tl.where(bias_batches == 1, 0, own_batch)
    past_batch = tl.where(bias_batches == 1, batches, own_batch + 1)
    bounds = bounds_of(call)

    total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for b in tl.range(first_batch, past_batch, num_stages=1):
        batch = tl.cast(b, tl.int64)
        for h in tl.range(first_head, past_head, num_stages=1):
            head = tl.cast(h, tl.int64)
            bias = call.bias + batch * call.bias_batch + head * call.bias_head
            options = head_options(head, bias, call, F)
            row_base = (batch * call.heads + head) * call.seqlen_q
            for query_tile in tl.range(first_query_tile, past_query_tile, num_stages=1):
                first_query = query_tile * BLOCK_Q
                query = first_query + tl.arange(0, BLOCK_Q)
                left_q = call.seqlen_q - first_query
                offset_q = tl.cast(first_query, tl.int64)
                intervals = call.intervals + batch * call.interval_batch
                rows = with_slope(
                    query_rows(query[:, None], batch, bounds, intervals, call.plane, F), options, F
                )
                q_base = q.pointer + batch * q.batch + head * q.head + offset_q * q.row
                dout_base = (
                    dout.pointer + batch * dout.batch + head * dout.head + offset_q * dout.row
                )
                q_tile = load_tile(q_base, q.row, left_q, True, BLOCK_Q, C.head_dim, BLOCK_D)
                dout_tile = load_tile(
                    dout_base, dout.row, left_q, True, BLOCK_Q, C.value_dim, C.block_v
                )
                lse2 = tl.load(
                    lse2_ptr + row_base + query, mask=query < call.seqlen_q, other=float("inf")
                )
                delta = tl.load(delta_ptr + row_base + query, mask=query < call.seqlen_q, other=0.0)
                for key_tile in tl.range(first_key_tile, past_key_tile, num_stages=1):
                    first_key = key_tile * BLOCK_K
                    left_k = call.seqlen_k - first_key
                    offset_k = tl.cast(first_key, tl.int64)
                    key = first_key + tl.arange(0, BLOCK_K)[None, :]
                    position = key_position(
                        call.positions + batch * call.position_batch, key, call.seqlen_k, F
                    )
                    k_base = (
                        k.pointer + batch * k.batch + (head // C.group) * k.head + offset_k * k.row
                    )
                    v_base = (
                        v.pointer + batch * v.batch + (head // C.group) * v.head + offset_k * v.row
                    )
                    k_tile = load_tile(k_base, k.row, left_k, True, BLOCK_K, C.head_dim, BLOCK_D)
                    v_tile = load_tile(v_base, v.row, left_k, True, BLOCK_K, C.value_dim, C.block_v)
                    products = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.precision)
                    products, _ = logits(
                        products, options, rows, key, first_key, position, bounds, F
                    )
                    mask = sees(rows, key, position, bounds, True, F) & (
                        query[:, None] < call.seqlen_q
                    )
                    mask = mask & (load_bias(options, rows, key, bounds) != float("-inf"))
                    if F.block_q:
                        blocks_of_head = table.rows + batch * table.batch + head * table.head
                        place = (
                            blocks_of_head
                            + (first_query // F.block_q) * table.row
                            + first_key // F.block_k
                        )
                        mask = mask & (tl.load(place) != 0)
                    dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=C.precision)
                    if F.dropout:
                        keep = kept(options, rows, first_key, position, False, F, BLOCK_Q, BLOCK_K)
                        dp = tl.where(keep, dp * call.keep_scale, 0.0)
                    ds = tl.exp2(products - lse2[:, None]) * (dp - delta[:, None])
                    total += tl.where(mask, ds, 0.0)

    stride_db, stride_dh, stride_dq, stride_dk = dbias_strides
    base = dbias_ptr + own_batch.to(tl.int64) * stride_db + own_head.to(tl.int64) * stride_dh
    query = first_query_tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    key = first_key_tile * BLOCK_K + tl.arange(0, BLOCK_K)
    if EACH_QUERY and EACH_KEY:
        pointers = (
            base + query[:, None].to(tl.int64) * stride_dq + key[None, :].to(tl.int64) * stride_dk
        )
        inside = (query[:, None] < call.seqlen_q) & (key[None, :] < call.seqlen_k)
        tl.store(pointers, total.to(dbias_ptr.dtype.element_ty), mask=inside)
    elif EACH_QUERY:
        by_query = tl.sum(total, 1).to(dbias_ptr.dtype.element_ty)
        tl.store(base + query.to(tl.int64) * stride_dq, by_query, mask=query < call.seqlen_q)
    elif EACH_KEY:
        by_key = tl.sum(total, 0).to(dbias_ptr.dtype.element_ty)
        tl.store(base + key.to(tl.int64) * stride_dk, by_key, mask=key < call.seqlen_k)
    else:
        tl.store(base, tl.sum(tl.sum(total, 1), 0).to(dbias_ptr.dtype.element_ty))


def dbias_launch(
    call: Call, dout: torch.Tensor, rows: Sequence[torch.Tensor], dbias: torch.Tensor, tile: Tile
) -> Launch:
    """Return the launch that fills dbias, contiguous. rows: log-sum-exps and delta, filled
    by `backward_launches`."""
    q, k, v, options = call
    bias_batches, bias_heads, bias_q, bias_k = dbias.shape
    batch, seqlen_q = q.shape[:2]
    # A dimension of size 1 owns the whole of that side, so it is walked through.
    each_query, each_key = bias_q > 1, bias_k > 1
    tiles = (ceil_div(seqlen_q, tile.block_q) if each_query else 1) * (
        ceil_div(k.shape[1], tile.block_k) if each_key else 1
    )
    mask, features = options.mask, features_of(options)
    table = table_of(mask, rows[0], "dq")
    if isinstance(mask, BlockMask):  # this kernel asks for single blocks
        dense = mask.blocks().to(torch.uint8)
        table = Table(dense, *broadcast_strides(dense)[:3], rows[0])
    return Launch(
        kernel=dbias_kernel,
        grid=(tiles * bias_batches * bias_heads,),
        args=(
            q, k, v, dout, *rows, dbias, *map(strides_of, (q, k, v, dout)), dbias.stride(), batch,
            bias_batches,
            bias_heads, *arguments_of(call, rows[0]).with_tables(table),
        ),
        constants={
            "EACH_QUERY": each_query, "EACH_KEY": each_key, "F": features,
            "C": tiling_of(call, features, tile, looped_keys=True),
        },
        options=tile.options(),
    )  # fmt: skip
