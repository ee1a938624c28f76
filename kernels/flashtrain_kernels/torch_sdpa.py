"""Attention where our kernels cannot run (CPU tensors, Apple GPUs): by torch's scaled_dot_product_attention where it
can express the call, by the reference otherwise.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

import logging

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from . import autograd, reference
from .environment import constant
from .options import Options

# The function is bound here, at the import: whoever later routes torch's own calls to ours makes no circle.
_logger = logging.getLogger("flashtrain_kernels")
_said = False


@constant
def _say_once(device_type: str) -> bool:
    """Log one line a process. Under torch.compile this runs once, while the graph is traced."""
    global _said
    if not _said:
        _said = True
        _logger.warning(
            "tensors are on %s: attention runs by torch's scaled_dot_product_attention, and with softcap, dropout or "
            "log-sum-exp by plain PyTorch (the Triton kernels need an NVIDIA GPU)",
            device_type,
        )
    return True


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """q (B, Sq, H, D), k, v (B, Sk, K, D) -> out (B, Sq, H, D), and the log-sum-exp (B, H, Sq) or None.

    torch's attention has no softcap and returns no log-sum-exp, and its dropout draws other numbers than the kernels'.
    Where one of these is asked for the reference computes, which stores the whole matrix.
    """
    _say_once(q.device.type)
    if with_lse or options.softcap > 0 or options.dropout_p > 0:
        # The operators exist for the CPU and CUDA; elsewhere autograd calls the same functions directly.
        if q.device.type in ("cpu", "cuda"):
            return autograd.attention((q, k, v), options)
        return reference.apply(q, k, v, options)
    # Statements, not expressions: under torch.compile a comparison of sizes may be a symbol, which torch's call
    # refuses.
    grouped = False
    if q.shape[2] != k.shape[2]:
        grouped = True
    unmasked = options.mask is None and options.bias is None and options.alibi_slopes is None and options.left is None
    top_left = False
    if unmasked and options.right is not None and options.right == 0:  # where torch's alignment is ours
        top_left = True
    mask, hidden = (None, None) if top_left or (unmasked and options.right is None) else _mask(q, k, options)
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=top_left,
        scale=options.scale,
        enable_gqa=grouped,
    )
    if hidden is not None:
        out = out.masked_fill(hidden, 0.0)
    return out.transpose(1, 2), None


def _mask(q: Tensor, k: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """torch's attn_mask (B or 1, H or 1, Sq, Sk), and the rows (B or 1, H or 1, Sq, 1) that see nothing.

    Those rows are let see everything, so that nothing is NaN, and the caller takes their result out again.
    """
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    seen = reference.visible_mask(seqlen_q, seqlen_k, options, q.device).expand(-1, -1, seqlen_q, seqlen_k)
    hidden = ~seen.any(-1, keepdim=True)
    seen = seen | hidden
    added = None
    if options.bias is not None:
        # Also a bias of -inf would hide the whole row.
        added = options.bias.masked_fill(options.bias == -torch.inf, 0.0)
    if options.alibi_slopes is not None:
        exact = torch.promote_types(q.dtype, torch.float32)
        slopes = reference.alibi(batch, seqlen_q, seqlen_k, options, exact)
        added = slopes if added is None else slopes + added
    if added is None:
        return seen, hidden
    return torch.where(seen, added, -torch.inf), hidden
