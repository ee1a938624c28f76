"""Attention where these kernels cannot run (CPU tensors, Apple GPUs): by torch's own
attention, or by the reference.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

import logging
import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from . import ops, reference
from .eager import attention
from .environment import autocast_dtype, constant
from .forms import BATCH
from .launch_cache import signature
from .options import Options

# The function is bound here, at the import: whoever later routes torch's own calls to
# ours makes no circle.
_logger = logging.getLogger("flashtrain_kernels")
_reported = False


@constant
def _report_once(device_type: str) -> bool:
    """Warn, once a process, that torch computes attention and not the kernels; return True. Under
    torch.compile this runs once, while the graph is traced."""
    global _reported
    if not _reported:
        _reported = True
        _logger.warning(
            "tensors are on %s: torch's scaled_dot_product_attention computes attention, but "
            "plain PyTorch for calls with softcap, dropout or log-sum-exp (the Triton "
            "kernels need an NVIDIA GPU)",
            device_type,
        )
    return True


def attention_by_torch(
    q: Tensor, k: Tensor, v: Tensor, options: Options, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute (out (B, Sq, H, D), log-sum-exp (B, H, Sq) or None) of q (B, Sq, H, D) and k, v
    (B, Sk, K, D) by torch.

    The reference, which stores the whole score matrix, computes calls with softcap,
    dropout or with_lse: torch's attention has no softcap and no log-sum-exp, and its
    dropout drops other weights.
    """
    _report_once(q.device.type)
    if autocast_dtype(q.device.type) is not None:  # the inputs are cast; a bias in float32 stays so
        with torch.autocast(q.device.type, enabled=False):
            return attention_by_torch(q, k, v, options, with_lse)
    # Statements: under torch.compile a comparison of sizes may be a symbol, which
    # torch's call refuses.
    grouped = False
    if q.shape[2] != k.shape[2]:
        grouped = True
    unmasked = (
        options.mask is None
        and options.bias is None
        and options.alibi_slopes is None
        and options.left is None
    )
    top_left = False
    # Where torch's alignment is ours.
    if unmasked and options.right is not None and options.right == 0:
        top_left = True
    masked = not (top_left or (unmasked and options.right is None))
    exact = with_lse or options.softcap > 0 or options.dropout_p > 0
    if (masked or top_left) and not exact:
        # torch multiplies the weight 0 of a masked pair with what is there, and 0 * NaN is NaN.
        finite = _is_finite(q, k, v, options.bias)
        if finite is False or (finite is None and masked):
            q, k, v = _unseen_as_zeros(q, k, v, options)
            exact = finite is False and _is_finite(q, k, v, options.bias) is False
    if exact:
        # The operators exist for the CPU and CUDA; elsewhere autograd calls the
        # same functions directly.
        if q.device.type in ("cpu", "cuda"):
            return attention(ops.FORWARD_IN[BATCH], (q, k, v), options)
        return reference.apply(q, k, v, options)
    mask, hidden = _mask(q, k, options) if masked else (None, None)
    if top_left:
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]  # nobody sees the others
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=top_left,
        scale=options.scale,
        enable_gqa=grouped,
    )
    out = out.transpose(1, 2)  # first: what masked_fill returns is contiguous
    return out if hidden is None else out.masked_fill(hidden.transpose(1, 2), 0.0), None


def _mask(q: Tensor, k: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """torch's attn_mask (B or 1, H or 1, Sq, Sk), and the rows (B or 1, H or 1,
    Sq, 1) that see nothing."""
    # Those rows are let see everything, so that nothing is NaN, and the caller takes
    # their result out again.
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    seen = reference.visible_mask(seqlen_q, seqlen_k, options, q.device).expand(
        -1, -1, seqlen_q, seqlen_k
    )
    hidden = ~seen.any(-1, keepdim=True)
    added = options.bias
    if options.alibi_slopes is not None:
        exact = torch.promote_types(q.dtype, torch.float32)
        slopes = reference.alibi(batch, seqlen_q, seqlen_k, options, exact)
        added = slopes if added is None else slopes + added
    if added is None:
        return seen | hidden, hidden
    return torch.where(seen, added, -torch.inf).masked_fill(hidden, 0.0), hidden


def _is_finite(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool | None:
    """Return whether every number is finite, except -inf in a bias; None if unknown: compilers and
    transforms hide the values, and reading another device would wait for it. Numbers whose sum
    overflows count as not finite."""
    if q.device.type != "cpu" or signature((q, k, v)) is None:
        return None
    exact = torch.promote_types(q.dtype, torch.bfloat16)  # float16 overflows soon
    with torch.no_grad():
        total = q.sum(dtype=exact) + k.sum(dtype=exact) + v.sum(dtype=exact)
        return math.isfinite(total) and (bias is None or bool(bias.sum(dtype=exact) < math.inf))


def _unseen_as_zeros(
    q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v with zeros in the queries that see nothing and in the keys that nobody
    sees."""
    seen = reference.visible_mask(q.shape[1], k.shape[1], options, q.device)
    seen = seen.expand(-1, -1, q.shape[1], k.shape[1])
    blind, unseen = ~seen.any(-1), ~seen.any(-2)  # (B or 1, H or 1, Sq) and (..., Sk)
    if unseen.shape[1] != 1:
        unseen = unseen.unflatten(1, (k.shape[2], -1)).all(2)  # by all heads of the key's group
    blind, unseen = (x.transpose(1, 2)[..., None] for x in (blind, unseen))
    return q.masked_fill(blind, 0.0), k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
