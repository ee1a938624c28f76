"""The kernel for the gradient of the bias: one program owns a tile of the bias and adds up, in a fixed order, every
batch row, head, query and key that the bias was broadcast over. So it is deterministic, and stores no score matrix.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension. It reads the base-2 log-sum-exp and
delta that the dQ kernel wrote.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from ...masks import BlockMask
from ...options import Options
from .launch import NOT_SPECIALISED, Launch, broadcast_strides, call_constants, ceil_div, option_arguments
from .scores import head_options, kept, load_bias, logits, with_slope
from .tile_table import Tile
from .tiles import key_position, load_tile, query_rows, sees


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def dbias_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    dbias_ptr,
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
    stride_db,
    stride_dh,
    stride_dq,
    stride_dk,
    batches,
    bias_batches,
    bias_heads,
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
    EACH_QUERY: tl.constexpr,
    EACH_KEY: tl.constexpr,
    F: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    query_tiles = tl.cdiv(seqlen_q, BLOCK_Q)
    key_tiles = tl.cdiv(seqlen_k, BLOCK_K)
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
    bias_head = program % bias_heads
    bias_batch = program // bias_heads
    first_head = tl.where(bias_heads == 1, 0, bias_head)
    past_head = tl.where(bias_heads == 1, heads, bias_head + 1)
    first_batch = tl.where(bias_batches == 1, 0, bias_batch)
    past_batch = tl.where(bias_batches == 1, batches, bias_batch + 1)
    bounds = (seqlen_q, seqlen_k, band_left, band_right)

    total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for b in tl.range(first_batch, past_batch, num_stages=1):
        batch = tl.cast(b, tl.int64)
        for h in tl.range(first_head, past_head, num_stages=1):
            head = tl.cast(h, tl.int64)
            options = head_options(
                head, scale_log2, cap_in, cap_log2, slopes_ptr, stride_slopes,
                bias_ptr + batch * stride_bb + head * stride_bh, stride_bq, stride_bk, seed_ptr, threshold, F,
            )  # fmt: skip
            row_base = (batch * heads + head) * seqlen_q
            for query_tile in tl.range(first_query_tile, past_query_tile, num_stages=1):
                first_query = query_tile * BLOCK_Q
                query = first_query + tl.arange(0, BLOCK_Q)
                left_q = seqlen_q - first_query
                offset_q = tl.cast(first_query, tl.int64)
                rows = query_rows(query[:, None], batch, bounds, mask_ptr + batch * stride_mask, mask_plane, F)
                rows = with_slope(rows, options, F)
                q_base = q_ptr + batch * stride_qb + head * stride_qh + offset_q * stride_qs
                dout_base = dout_ptr + batch * stride_gb + head * stride_gh + offset_q * stride_gs
                q = load_tile(q_base, stride_qs, left_q, True, BLOCK_Q, HEAD_DIM, BLOCK_D)
                dout = load_tile(dout_base, stride_gs, left_q, True, BLOCK_Q, HEAD_DIM, BLOCK_D)
                lse2 = tl.load(lse2_ptr + row_base + query, mask=query < seqlen_q, other=float("inf"))
                delta = tl.load(delta_ptr + row_base + query, mask=query < seqlen_q, other=0.0)
                for key_tile in tl.range(first_key_tile, past_key_tile, num_stages=1):
                    first_key = key_tile * BLOCK_K
                    left_k = seqlen_k - first_key
                    offset_k = tl.cast(first_key, tl.int64)
                    key = first_key + tl.arange(0, BLOCK_K)[None, :]
                    position = key_position(positions_ptr + batch * stride_positions, key, seqlen_k, F)
                    k_base = k_ptr + batch * stride_kb + (head // GROUP) * stride_kh + offset_k * stride_ks
                    v_base = v_ptr + batch * stride_vb + (head // GROUP) * stride_vh + offset_k * stride_vs
                    k = load_tile(k_base, stride_ks, left_k, True, BLOCK_K, HEAD_DIM, BLOCK_D)
                    v = load_tile(v_base, stride_vs, left_k, True, BLOCK_K, HEAD_DIM, BLOCK_D)
                    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                    scores, _ = logits(scores, options, rows, key, first_key, position, bounds, F)
                    mask = sees(rows, key, position, bounds, True, F) & (query[:, None] < seqlen_q)
                    mask = mask & (load_bias(options, rows, key, bounds) != float("-inf"))
                    if F.block_q:
                        blocks = table_ptr + batch * stride_tb + head * stride_th
                        place = blocks + (first_query // F.block_q) * stride_tr + first_key // F.block_k
                        mask = mask & (tl.load(place) != 0)
                    dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
                    if F.dropout:
                        keep = kept(options, rows, first_key, position, False, F, BLOCK_Q, BLOCK_K)
                        dp = tl.where(keep, dp * keep_scale, 0.0)
                    ds = tl.exp2(scores - lse2[:, None]) * (dp - delta[:, None])
                    total += tl.where(mask, ds, 0.0)

    base = dbias_ptr + bias_batch.to(tl.int64) * stride_db + bias_head.to(tl.int64) * stride_dh
    query = first_query_tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    key = first_key_tile * BLOCK_K + tl.arange(0, BLOCK_K)
    if EACH_QUERY and EACH_KEY:
        pointers = base + query[:, None].to(tl.int64) * stride_dq + key[None, :].to(tl.int64) * stride_dk
        inside = (query[:, None] < seqlen_q) & (key[None, :] < seqlen_k)
        tl.store(pointers, total.to(dbias_ptr.dtype.element_ty), mask=inside)
    elif EACH_QUERY:
        by_query = tl.sum(total, 1).to(dbias_ptr.dtype.element_ty)
        tl.store(base + query.to(tl.int64) * stride_dq, by_query, mask=query < seqlen_q)
    elif EACH_KEY:
        by_key = tl.sum(total, 0).to(dbias_ptr.dtype.element_ty)
        tl.store(base + key.to(tl.int64) * stride_dk, by_key, mask=key < seqlen_k)
    else:
        tl.store(base, tl.sum(tl.sum(total, 1), 0).to(dbias_ptr.dtype.element_ty))


def dbias_launch(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    rows: Sequence[torch.Tensor],
    dbias: torch.Tensor,
    tile: Tile,
    tf32: bool = True,
) -> Launch:
    """The launch that fills dbias, contiguous and of the bias's shape. rows: the backward's workspace, filled by dQ."""
    bias_batches, bias_heads, bias_q, bias_k = dbias.shape
    batch, seqlen_q = q.shape[:2]
    # A dimension of size 1 owns the whole of that side, so it is walked through.
    each_query, each_key = bias_q > 1, bias_k > 1
    tiles = (ceil_div(seqlen_q, tile.block_q) if each_query else 1) * (
        ceil_div(k.shape[1], tile.block_k) if each_key else 1
    )
    mask = options.mask
    arguments = option_arguments(
        q, k, rows[0], replace(options, mask=None) if isinstance(mask, BlockMask) else options, "dq"
    )
    if isinstance(mask, BlockMask):
        arguments = _with_blocks(arguments, mask)
    constants: dict[str, Any] = {"EACH_QUERY": each_query, "EACH_KEY": each_key}
    return Launch(
        kernel=dbias_kernel,
        grid=(tiles * bias_batches * bias_heads,),
        args=(
            q, k, v, dout, rows[0], rows[1], dbias, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            *dout.stride()[:3], *dbias.stride(), batch, bias_batches, bias_heads, *arguments,
        ),
        constants={**constants, **call_constants(q, k, options, tile, tf32, looped_keys=True)},
        options=tile.options(),
    )  # fmt: skip


def _with_blocks(arguments: tuple[Any, ...], mask: BlockMask) -> tuple[Any, ...]:
    """The table argument and its strides replaced by the dense map of blocks: this kernel asks for single blocks."""
    blocks = mask.blocks().to(torch.uint8)
    batch, head, row, _ = broadcast_strides(blocks)
    place = 13  # of table_ptr among the arguments
    return (*arguments[:place], blocks, batch, head, row, *arguments[place + 4 :])
