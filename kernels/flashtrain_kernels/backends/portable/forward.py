"""The forward kernel: online softmax over key tiles (FlashAttention-2, arXiv 2307.08691, algorithm 1).

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.

One program computes BLOCK_Q queries of one head. Plain scores stay unscaled; scale * log2(e) enters with the one
fused multiply-add that also subtracts the row maximum, and exp2 replaces exp.
"""

import torch
import triton
import triton.language as tl

from ...options import Options
from .launch import NOT_SPECIALISED, Launch, call_constants, ceil_div, option_arguments
from .scores import head_options, kept, load_bias, logits, with_slope
from .tile_table import Tile
from .tiles import CAREFUL_BLOCK, has_nan, is_finite, key_position, load_tile, query_rows, sees, store_tile
from .traversal import key_pieces, listed_block, position_of_step, steps

# The row maximum of a row that has seen nothing yet. Finite, so that exp2(-inf - maximum) is 0 and never NaN.
_NOTHING = tl.constexpr(-3.0e38)


@triton.jit
def _attend(
    acc,
    row_sum,
    row_max,
    q,
    rows,
    keys,
    bounds,
    pieces,
    head,
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
    """Take the masked (or the unmasked) key tiles into the running output, sum and maximum of each row."""
    k_base, stride_ks, v_base, stride_vs, positions, list_ptr = keys
    block = listed_block(0, pieces, list_ptr, MASKED, CAREFUL, F, TILES)
    for i in tl.range(0, steps(pieces, MASKED, CAREFUL, BLOCK_K // STEP)):
        first_key = position_of_step(i, block, pieces, list_ptr, MASKED, CAREFUL, F, TILES, BLOCK_K, STEP)
        block = listed_block(i + 1, pieces, list_ptr, MASKED, CAREFUL, F, TILES)
        offset = tl.cast(first_key, tl.int64)
        left = bounds[1] - first_key
        k = load_tile(k_base + offset * stride_ks, stride_ks, left, MASKED, STEP, HEAD_DIM, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        key = first_key + tl.arange(0, STEP)[None, :]
        position = key_position(positions, key, bounds[1], F)
        if F.softcap or F.alibi or F.bias:
            scores, _ = logits(scores, head, rows, key, first_key, position, bounds, F)
        if MASKED:
            mask = sees(rows, key, position, bounds, True, F)
            if CAREFUL and F.bias:
                mask = mask & (load_bias(head, rows, key, bounds) != float("-inf"))
            scores = tl.where(mask, scores, float("-inf"))
        if F.softcap or F.alibi or F.bias:
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            weights = tl.exp2(scores - new_max[:, None])
        else:
            new_max = tl.maximum(row_max, tl.max(scores, 1) * head[0])
            weights = tl.exp2(scores * head[0] - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max
        acc = acc * rescale[:, None]
        if F.dropout:
            weights = tl.where(kept(head, rows, first_key, position, False, F, BLOCK_Q, STEP), weights, 0.0)
        v = load_tile(v_base + offset * stride_vs, stride_vs, left, MASKED, STEP, HEAD_DIM, BLOCK_D)
        if CAREFUL:
            # 0 * NaN is NaN: keep inf and NaN out of the product; `_reached` gives them to the rows that do see them.
            v = tl.where(is_finite(v), v, 0.0).to(v.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, row_sum, row_max


@triton.jit
def _reached(
    reached,
    rows,
    keys,
    bounds,
    pieces,
    head,
    F: tl.constexpr,
    TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add up, for each number of the output, how many inf and NaN values of its column its row sees."""
    _, _, v_base, stride_vs, positions, list_ptr = keys
    for i in tl.range(0, steps(pieces, True, True, BLOCK_K // STEP), num_stages=1):
        first_key = position_of_step(i, 0, pieces, list_ptr, True, True, F, TILES, BLOCK_K, STEP)
        key = first_key + tl.arange(0, STEP)[None, :]
        mask = sees(rows, key, key_position(positions, key, bounds[1], F), bounds, True, F)
        if F.bias:
            mask = mask & (load_bias(head, rows, key, bounds) != float("-inf"))
        offset = tl.cast(first_key, tl.int64)
        v = load_tile(v_base + offset * stride_vs, stride_vs, bounds[1] - first_key, True, STEP, HEAD_DIM, BLOCK_D)
        wrong = tl.where(is_finite(v), 0.0, 1.0).to(v.dtype)
        reached = tl.dot(mask.to(v.dtype), wrong, reached, input_precision=PRECISION)
    return reached


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_ob,
    stride_os,
    stride_oh,
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
    # The tiles of a head run next to each other, heads of one key/value group too: they share K and V in the L2 cache.
    tiles = tl.cdiv(seqlen_q, BLOCK_Q)
    tile = tl.program_id(0) % tiles
    head_index = tl.program_id(0) // tiles
    if F.right or F.intervals:  # late queries mostly see most: longest first, so that none runs alone at the end
        tile = tiles - 1 - tile
    batch = (head_index // heads).to(tl.int64)
    head = (head_index % heads).to(tl.int64)
    first_query = tile * BLOCK_Q
    query = first_query + tl.arange(0, BLOCK_Q)
    offset = tl.cast(first_query, tl.int64)
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
    rows = query_rows(query[:, None], batch, bounds, mask_ptr + batch * stride_mask, mask_plane, F)
    rows = with_slope(rows, options, F)
    pieces = key_pieces(
        first_query, bounds, table_ptr + batch * stride_tb + head * stride_th, stride_tr, F, BLOCK_Q, BLOCK_K
    )
    q_base = q_ptr + batch * stride_qb + head * stride_qh + offset * stride_qs
    q = load_tile(q_base, stride_qs, seqlen_q - first_query, True, BLOCK_Q, HEAD_DIM, BLOCK_D)

    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    row_max = tl.full([BLOCK_Q], _NOTHING, tl.float32)
    for MASKED in tl.static_range(2):
        acc, row_sum, row_max = _attend(
            acc, row_sum, row_max, q, rows, keys, bounds, pieces, options, MASKED == 1, False, F, TILES, HEAD_DIM,
            BLOCK_D, BLOCK_Q, BLOCK_K, BLOCK_K, PRECISION,
        )  # fmt: skip
    HIDES: tl.constexpr = F.left or F.right or F.intervals or F.block_q or F.bias
    wrong = False
    if HIDES:
        wrong = has_nan(acc)
        if wrong:
            # Rare: a NaN, or an inf in a masked value (0 * inf). Compute again in small tiles, keeping masked pairs
            # out.
            acc, row_sum, row_max = _attend(
                tl.zeros([BLOCK_Q, BLOCK_D], tl.float32), tl.zeros([BLOCK_Q], tl.float32),
                tl.full([BLOCK_Q], _NOTHING, tl.float32), q, rows, keys, bounds, pieces, options, True, True, F, TILES,
                HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, CAREFUL_BLOCK, PRECISION,
            )  # fmt: skip

    empty = row_sum == 0
    total = tl.where(empty, 1.0, row_sum)
    if F.dropout:
        acc = acc * keep_scale
    acc = acc / total[:, None]
    lse = tl.where(empty, float("-inf"), (row_max + tl.log2(total)) * 0.6931471805599453)
    lse_base = lse_ptr + tl.cast(head_index, tl.int64) * seqlen_q
    tl.store(lse_base + query, lse, mask=query < seqlen_q)
    out_base = out_ptr + batch * stride_ob + head * stride_oh + offset * stride_os
    store_tile(out_base, stride_os, seqlen_q - first_query, acc, BLOCK_Q, HEAD_DIM, BLOCK_D)
    if HIDES:  # noqa: SIM102 - the first is decided while compiling, the second while running
        if wrong:  # a pass of its own: the two sums together would not fit the registers at D = 256
            reached = _reached(
                tl.zeros([BLOCK_Q, BLOCK_D], tl.float32), rows, keys, bounds, pieces, options, F, TILES, HEAD_DIM,
                BLOCK_D, BLOCK_K, CAREFUL_BLOCK, PRECISION,
            )  # fmt: skip
            column = tl.arange(0, BLOCK_D)
            pointers = out_base + tl.arange(0, BLOCK_Q)[:, None] * stride_os + column[None, :]
            seen = (reached > 0) & (query[:, None] < seqlen_q) & (column[None, :] < HEAD_DIM)
            nothing = tl.full([BLOCK_Q, BLOCK_D], float("nan"), tl.float32).to(out_ptr.dtype.element_ty)
            tl.debug_barrier()  # after the stores above, which other threads may have made
            tl.store(pointers, nothing, mask=seen)


def forward_launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: Options,
    tile: Tile,
    tf32: bool = True,
) -> Launch:
    """The launch that fills out (B, Sq, H, D) and lse (B, H, Sq) from q (B, Sq, H, D), k, v (B, Sk, K, D)."""
    batch, seqlen_q, heads, _ = q.shape
    return Launch(
        kernel=forward_kernel,
        grid=(ceil_div(seqlen_q, tile.block_q) * batch * heads,),
        args=(
            q, k, v, out, lse, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            *option_arguments(q, k, lse, options, "forward"),
        ),
        constants=call_constants(q, k, options, tile, tf32, looped_keys=True),
        options=tile.options(),
    )  # fmt: skip


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, tile: Tile, tf32: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate and compute (out, lse)."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    forward_launch(q, k, v, out, lse, options, tile, tf32).run()
    return out, lse
