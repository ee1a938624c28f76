"""The backward pass (FlashAttention-2, arXiv 2307.08691, algorithm 2), without atomics: bitwise deterministic.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension. Two launches: dq.py's kernel, query by
query, then dkdv.py's, key by key. The scores are computed in both, seven products where five would do; in exchange no
two programs ever add to the same number.
"""

import math

import torch
import triton

from .dkdv import dkdv_kernel
from .dq import dq_kernel
from .launch import Launch, precision


def backward_launches(
    dout, dlse, q, k, v, out, lse, documents, scale, causal, dq, dk, dv, rows, tile_dkdv, tile_dq, tf32=True
) -> tuple[Launch, Launch]:
    """The two launches, in this order, that fill dq, and dk and dv.

    rows: (2, B, H, Sq) float32 workspace, base-2 LSE and delta: the first launch writes it, the second reads it.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    block_d = max(16, triton.next_power_of_2(head_dim))
    start, end = (lse, lse) if documents is None else documents  # never read without documents; only has to be a tensor
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
    constants = {
        "GROUP": heads // kv_heads,
        "CAUSAL": causal,
        "DOCUMENTS": documents is not None,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "PRECISION": precision(q.dtype, tf32),
    }
    scale_log2 = scale * math.log2(math.e)
    dkdv = Launch(
        kernel=dkdv_kernel,
        grid=(triton.cdiv(seqlen_k, tile_dkdv.block_k) * batch * kv_heads,),
        args=(
            q, k, v, dout, rows[0], rows[1], dk, dv, start, end, *strides, *dk.stride()[:3], *dv.stride()[:3],
            kv_heads, seqlen_q, seqlen_k, scale, scale_log2,
        ),
        constants={**constants, "BLOCK_Q": tile_dkdv.block_q, "BLOCK_K": tile_dkdv.block_k},
        options=tile_dkdv.options(),
    )  # fmt: skip
    dquery = Launch(
        kernel=dq_kernel,
        grid=(triton.cdiv(seqlen_q, tile_dq.block_q) * batch * heads,),
        args=(
            q, k, v, dout, out, lse, lse if dlse is None else dlse, rows[0], rows[1], dq, start, end,
            *strides, *out.stride()[:3], *dq.stride()[:3], heads, seqlen_q, seqlen_k, scale, scale_log2,
        ),
        constants={
            **constants, "HAS_DLSE": dlse is not None, "BLOCK_Q": tile_dq.block_q, "BLOCK_K": tile_dq.block_k,
        },
        options=tile_dq.options(),
    )  # fmt: skip
    return dquery, dkdv


def backward(
    dout, dlse, q, k, v, out, lse, documents, scale, causal, dq, dk, dv, tile_dkdv, tile_dq, tf32=True
) -> None:
    """Fill dq, dk and dv (any strides whose last is 1)."""
    rows = torch.empty((2, *lse.shape), dtype=torch.float32, device=lse.device)
    for launch in backward_launches(
        dout, dlse, q, k, v, out, lse, documents, scale, causal, dq, dk, dv, rows, tile_dkdv, tile_dq, tf32
    ):
        launch.run()
