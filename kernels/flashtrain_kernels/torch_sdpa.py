"""Attention by torch's scaled_dot_product_attention: where our kernels cannot run (CPU tensors, Apple GPUs).

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

import logging

import torch
from torch.nn import functional

from . import reference
from .masks import Documents, visible

_logger = logging.getLogger("flashtrain_kernels")
_said = False


@torch.compiler.assume_constant_result
def _say_once(device_type: str) -> bool:
    """Log one line a process. Under torch.compile this runs once, while the graph is traced."""
    global _said
    if not _said:
        _said = True
        _logger.warning(
            "tensors are on %s: attention runs by torch's scaled_dot_product_attention "
            "(the Triton kernels need an NVIDIA GPU)",
            device_type,
        )
    return True


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    documents: Documents | None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """q (B, Sq, H, D), k, v (B, Sk, K, D) -> out (B, Sq, H, D), with return_lse also the log-sum-exp (B, H, Sq).

    torch returns no log-sum-exp, so a call that asks for it is computed by the reference, which stores the whole
    matrix.
    """
    _say_once(q.device.type)
    if return_lse:
        return reference.attention(
            q, k, v, softmax_scale=softmax_scale, causal=causal, documents=documents, return_lse=True
        )
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    # Statements, not expressions: under torch.compile a comparison of sizes may be a symbol, which torch's call
    # refuses.
    grouped = False
    if q.shape[2] != k.shape[2]:
        grouped = True
    top_left = False
    if causal and documents is None and seqlen_q == seqlen_k:  # where torch's alignment is ours
        top_left = True
    mask = None
    hidden = None
    if not top_left:
        mask = visible(seqlen_q, seqlen_k, causal=causal, documents=documents, device=q.device)
    if causal and seqlen_q > seqlen_k and mask is not None:
        # These rows see nothing: let them see everything, so that nothing is NaN, and take the result out again.
        hidden = ~mask.any(-1, keepdim=True)
        mask = mask | hidden
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=top_left,
        scale=softmax_scale,
        enable_gqa=grouped,
    )
    if hidden is not None:
        out = out.masked_fill(hidden, 0.0)
    return out.transpose(1, 2)
