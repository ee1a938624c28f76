"""The launches of a backward (FlashAttention-2, arXiv 2307.08691, algorithm 2), without
atomics, so deterministic.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension. Both the dQ and
the dK/dV kernel compute the scores, seven matrix products where five would do; in exchange no two
programs ever add to the same number.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .. import Call, Gradients
from .dkdv import compute_dkdv, dkdv_kernel
from .dq import ROWS, compute_dq, dq_kernel, rows_kernel
from .launch import (
    NOT_SPECIALISED,
    Arguments,
    Launch,
    Table,
    arguments_of,
    ceil_div,
    features_of,
    strides_of,
    table_of,
    tiling_of,
)
from .tile_table import Tiles
from .tiles import Strided


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def both_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dq_ptr, q_strides, k_strides, v_strides,
    dout_strides,
    dq_strides, dk_ptr, dv_ptr, dk_strides, dv_strides, scale,
    bias, bias_batch, bias_head, bias_q, bias_k, slopes, slope_row, seed, intervals, plane,
    interval_batch, positions,
    position_batch, table_rows, table_batch, table_head, table_row, blocks, dq_table_rows,
    dq_table_batch,
    dq_table_head, dq_table_row, dq_blocks, heads, seqlen_q, seqlen_k, left, right, scale_log2,
    cap_in, cap_log2,
    threshold, keep_scale, programs_dkdv, programs_dq,
    F: tl.constexpr, C_DKDV: tl.constexpr, C_DQ: tl.constexpr,
):  # fmt: skip
    """Kernel: one program computes a tile of dK and dV, or a tile of dQ, all in one launch.
    Arguments as in dkdv_kernel and dq_kernel; dq_table_*, dq_blocks, C_DQ: those of dQ; programs_*:
    how many programs dK/dV and dQ have."""
    # Two launches would leave part of the GPU idle between them. The grid's second axis chooses:
    # dK/dV, longer, first.
    call = Arguments(
        bias, bias_batch, bias_head, bias_q, bias_k, slopes, slope_row, seed, intervals, plane,
        interval_batch,
        positions, position_batch, heads, seqlen_q, seqlen_k, left, right, scale_log2, cap_in,
        cap_log2, threshold,
        keep_scale,
    )  # fmt: skip
    q = Strided(q_ptr, *q_strides)
    k = Strided(k_ptr, *k_strides)
    v = Strided(v_ptr, *v_strides)
    dout = Strided(dout_ptr, *dout_strides)
    if tl.program_id(1) == 1:
        if tl.program_id(0) < programs_dq:
            dq_table = Table(dq_table_rows, dq_table_batch, dq_table_head, dq_table_row, dq_blocks)
            dq = Strided(dq_ptr, *dq_strides)
            compute_dq(
                q, k, v, dout, dout, lse2_ptr, lse2_ptr, lse2_ptr, delta_ptr, dq, scale, call,
                dq_table, False, True, F,
                C_DQ,
            )  # fmt: skip
    else:
        if tl.program_id(0) < programs_dkdv:
            table = Table(table_rows, table_batch, table_head, table_row, blocks)
            dk = Strided(dk_ptr, *dk_strides)
            dv = Strided(dv_ptr, *dv_strides)
            compute_dkdv(q, k, v, dout, lse2_ptr, delta_ptr, dk, dv, scale, call, table, F, C_DKDV)


def backward_launches(
    call: Call, gradients: Gradients, rows: Sequence[torch.Tensor], tiles: Tiles
) -> tuple[Launch, ...]:
    """Return the launches, two or for wide heads three, in order, that fill gradients.dq, dk and
    dv. rows: two (B, H, Sq) float32 workspaces for the base-2 log-sum-exps and delta (see
    dq.row_terms), which the first launch writes and the others read."""
    q, k, v, options = call
    dout, dlse, out, lse, dq, dk, dv, _ = gradients
    batch, seqlen_q, heads, _ = q.shape
    given, strides = (q, k, v, dout), tuple(map(strides_of, (q, k, v, dout)))
    of_out, of_dq, of_dk, of_dv = map(strides_of, (out, dq, dk, dv))
    lses = (lse, lse if dlse is None else dlse)
    programs_dkdv = ceil_div(k.shape[1], tiles.dkdv.block_k) * batch * k.shape[2]
    programs_dq = ceil_div(seqlen_q, tiles.dq.block_q) * batch * heads
    features = features_of(options)
    tiling_dkdv = tiling_of(call, features, tiles.dkdv, looped_keys=False)
    tiling_dq = tiling_of(call, features, tiles.dq, looped_keys=True)
    arguments = arguments_of(call, lse)
    table, dq_table = (table_of(options.mask, lse, kernel) for kernel in ("dkdv", "dq"))
    if tiles.together:  # which is faster the table says
        first = Launch(
            kernel=rows_kernel,
            grid=(ceil_div(seqlen_q, ROWS) * batch * heads,),
            args=(dout, out, *lses, *rows, strides[3], of_out, heads, seqlen_q),
            constants={
                "HAS_DLSE": dlse is not None, "VALUE_DIM": v.shape[3],
                "BLOCK_V": tiling_dq.block_v, "BLOCK_Q": ROWS
            },
            options={"num_warps": 4},
        )  # fmt: skip
        second = Launch(
            kernel=both_kernel,
            grid=(max(programs_dkdv, programs_dq), 2),
            args=(
                *given, *rows, dq, *strides, of_dq, dk, dv, of_dk, of_dv, options.scale,
                *arguments.with_tables(table + dq_table), programs_dkdv, programs_dq,
            ),
            constants={"F": features, "C_DKDV": tiling_dkdv, "C_DQ": tiling_dq},
            options=tiles.dkdv.options(),
        )  # fmt: skip
        return first, second
    of_gradients = {"dk": tiles.dkdv, "dv": tiles.dv} if tiles.dv else {"": tiles.dkdv}
    dkdv = [
        Launch(
            kernel=dkdv_kernel,
            grid=(programs_dkdv,),
            args=(
                *given, *rows, dk, dv, *strides, of_dk, of_dv, options.scale,
                *arguments.with_tables(table)
            ),
            constants={"F": features, "C": tiling_dkdv._replace(gradient=gradient)},
            options=tile.options(),
        )
        for gradient, tile in of_gradients.items()
    ]  # fmt: skip
    dquery = Launch(
        kernel=dq_kernel,
        grid=(programs_dq,),
        args=(
            *given, out, *lses, *rows, dq, *strides, of_out, of_dq, options.scale,
            *arguments.with_tables(dq_table)
        ),
        constants={"HAS_DLSE": dlse is not None, "F": features, "C": tiling_dq},
        options=tiles.dq.options(),
    )  # fmt: skip
    return dquery, *dkdv
