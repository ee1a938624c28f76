"""flash-attn's S_dmask: attention weights that show by their sign which of them dropout dropped.

B batch, Sq queries, Sk keys, H query heads, D head dimension, N packed sequences.
"""

import torch
from torch import Tensor

from . import reference
from .options import Options
from .packing import Packing


@torch.no_grad()
def signed_probabilities(
    q: Tensor, k: Tensor, lse: Tensor, options: Options, packing: Packing | None = None
) -> Tensor:
    """Return flash-attn's S_dmask: the attention weights before dropout, negative
    where dropout drops them.

    Returns:
        (B, H, Sq, Sk) in q's dtype, -0.0 where a dropped weight is 0; for packed sequences (N, H,
        max_seqlen_q, max_seqlen_k), 0 past their ends; without dropout (0,).
    """
    if options.dropout_p == 0:
        return q.new_empty((0,))
    weights = reference.probabilities(q, k, lse, options).to(q.dtype)
    weights = torch.where(
        reference.dropout_mask(q.shape, k.shape, options, q.device), weights, -weights
    )
    if packing is None:
        return weights
    queries, real_queries = _places(packing.cu_seqlens_q, packing.max_seqlen_q, q.shape[1])
    keys, real_keys = _places(packing.cu_seqlens_k, packing.max_seqlen_k, k.shape[1])
    if q.shape[1] == 0 or k.shape[1] == 0:
        return weights.new_zeros((queries.shape[0], q.shape[2], queries.shape[1], keys.shape[1]))
    # (N, H, queries, keys).
    apart = weights[0][:, queries[:, :, None], keys[:, None, :]].transpose(0, 1)
    return torch.where((real_queries[:, :, None] & real_keys[:, None, :])[:, None], apart, 0.0)


def _places(cu_seqlens: Tensor, longest: int | Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return, (N, longest) each: the index in the packed row of every token of each sequence, and
    whether the sequence has that token."""
    index = cu_seqlens[:-1, None] + torch.arange(int(longest), device=cu_seqlens.device)
    return index.clamp(max=max(total - 1, 0)), index < cu_seqlens[1:, None]
