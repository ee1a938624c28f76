"""What the backward kernels need of each query besides q and dO: its log-sum-exp in base 2, and delta.

B batch, Sq queries, H heads, D head dimension. delta = rowsum(dO * O) - dLSE (FlashAttention-2, arXiv 2307.08691,
algorithm 2, with the gradient of the log-sum-exp folded in).
"""

import triton
import triton.language as tl

from .launch import NOT_SPECIALISED
from .tiles import load_tile

# Rows a program, chosen for the memory system: each is one contiguous piece of O and of dO.
ROWS = 64


@triton.jit
def row_terms(out, dout, lse, dlse, inside, HAS_DLSE: tl.constexpr):
    """(base-2 log-sum-exp, delta) of a tile of queries, in float32. lse, dlse: pointers, one a row."""
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse, mask=inside, other=0.0)
    lse2 = tl.load(lse, mask=inside, other=float("inf")) * 1.4426950408889634
    # A row that saw nothing has no probabilities: exp2(x - inf) is 0 for whatever scores its masked pairs have.
    return tl.where(lse2 == float("-inf"), float("inf"), lse2), delta


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def rows_kernel(
    dout_ptr,
    out_ptr,
    lse_ptr,
    dlse_ptr,
    lse2_ptr,
    delta_ptr,
    stride_gb,
    stride_gs,
    stride_gh,
    stride_ob,
    stride_os,
    stride_oh,
    heads,
    seqlen_q,
    HAS_DLSE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Fill lse2 and delta, (B, H, Sq) float32: one program BLOCK_Q queries of a head."""
    tiles = tl.cdiv(seqlen_q, BLOCK_Q)
    first_query = (tl.program_id(0) % tiles) * BLOCK_Q
    head_index = tl.program_id(0) // tiles
    batch = (head_index // heads).to(tl.int64)
    head = (head_index % heads).to(tl.int64)
    query = first_query + tl.arange(0, BLOCK_Q)
    offset = tl.cast(first_query, tl.int64)
    left = seqlen_q - first_query
    dout_base = dout_ptr + batch * stride_gb + head * stride_gh + offset * stride_gs
    out_base = out_ptr + batch * stride_ob + head * stride_oh + offset * stride_os
    dout = load_tile(dout_base, stride_gs, left, True, BLOCK_Q, HEAD_DIM, BLOCK_D)
    out = load_tile(out_base, stride_os, left, True, BLOCK_Q, HEAD_DIM, BLOCK_D)
    rows = tl.cast(head_index, tl.int64) * seqlen_q + query
    lse2, delta = row_terms(out, dout, lse_ptr + rows, dlse_ptr + rows, query < seqlen_q, HAS_DLSE)
    tl.store(lse2_ptr + rows, lse2, mask=query < seqlen_q)
    tl.store(delta_ptr + rows, delta, mask=query < seqlen_q)
