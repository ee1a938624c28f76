"""Attention under a pattern of blocks by torch's own kernels, one block of queries at a time: nothing is S x S.

For evaluating on a CPU, where our kernels do not run: of 65,536 pixels a matrix of what is visible alone is 4 GiB.

Shapes: B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtrain_kernels import BlockMask


def takes_block_rows(q: Tensor, k: Tensor, v: Tensor, mask: object) -> bool:
    """Whether block_rows_attention computes this call: a pattern that all rows and heads share, of whole blocks without
    a band; no gradients (each block's would be as large as all keys), not while compiling."""
    if not isinstance(mask, BlockMask) or torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    shared = mask.query_rows.shape[:2] == (1, 1)
    whole = mask.seqlen_q % mask.block_size[0] == 0 and mask.seqlen_k % mask.block_size[1] == 0
    return shared and whole and mask.left is None and mask.right is None


def block_rows_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: BlockMask, dropout: float = 0.0
) -> Tensor:
    """softmax(q k^T scale) v, each block of queries with the keys that it sees; 0 where it sees none.

    q (B, Sq, H, D); k and v (B, Sk, K, D); result (B, Sq, H, D). A call that takes_block_rows.
    """
    size_q, size_k = mask.block_size
    keys, values = (tensor.transpose(1, 2).unflatten(2, (-1, size_k)) for tensor in (k, v))  # (B, K, nk, size_k, D)
    out = torch.zeros_like(q)
    for number, (begin, _, end) in enumerate(mask.query_rows[0, 0].tolist()):
        if begin == end:
            continue
        seen = mask.query_blocks[begin:end].long()
        here = slice(number * size_q, (number + 1) * size_q)
        found = F.scaled_dot_product_attention(
            q[:, here].transpose(1, 2),
            keys[:, :, seen].flatten(2, 3),
            values[:, :, seen].flatten(2, 3),
            dropout_p=dropout,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        out[:, here] = found.transpose(1, 2)
    return out
