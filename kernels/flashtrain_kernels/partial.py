"""Attention over a part of the keys at a time: forward, backward, and the
exact merging of the parts.

    out, lse = attention_forward(q, k_part, v_part, mask=part)    for each part of the keys
    merge_attention([...])                                        -> out and lse over all keys
    merge_attention_into(out, lse, part_out, part_lse)            the same for two of them, in place
    dq, dk, dv = attention_backward(dout, q, k_part, v_part, out, lse, mask=part)

B batch, S sequence (Sq queries, Sk keys), H query heads, K key/value heads, D head
dimension of q and k, Dv of v, T packed tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .arguments import check_tensors, sizes_of
from .attend import Requested, options_of
from .checks import FLOATING, check_device, check_dtype, check_shape
from .forms import BATCH
from .launch_cache import on_device
from .masks import Mask
from .ops import BACKWARD, FORWARD
from .options import Packed, pack


@torch.no_grad()
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention without autograd. Arguments as in `flash_attn_func`; the default mask
    and window hide nothing.

    Returns:
        out (B, Sq, H, Dv) in q's dtype, and the natural-log row log-sum-exp (B, H, Sq), float32
        (float64 for float64).
    """
    packed = _packed(
        (q, k, v), mask=mask, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap,
        dropout_p=dropout_p, dropout_seed=dropout_seed,
    )  # fmt: skip
    return FORWARD(q, k, v, *packed)


@torch.no_grad()
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    mask: Mask | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dq, dk, dv) from the given k and v only, which may be a part of the keys over
    which out and lse were computed.

    The dq of all parts add up to q's gradient. Arguments not listed must be those of the forward,
    dropout_seed included.

    Args:
        dout, out: (B, Sq, H, Dv), the gradient of the output, and the output over all keys.
        lse: (B, H, Sq), the log-sum-exp over all keys, from
            `attention_forward` or `merge_attention`.

    Returns:
        dq, dk, dv in the dtypes and shapes of q, k and v.

    Raises:
        TypeError, ValueError: the message names the argument.
    """
    if dropout_p > 0 and dropout_seed is None:
        raise ValueError(
            "dropout_seed must be the forward's own seed with dropout_p above 0, not None"
        )
    packed = _packed(
        (q, k, v), mask=mask, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap,
        dropout_p=dropout_p, dropout_seed=dropout_seed,
    )  # fmt: skip
    rows = (q.shape[0], q.shape[2], q.shape[1])
    of_out = (*q.shape[:3], v.shape[3])
    for name, x, shape in (("dout", dout, of_out), ("out", out, of_out), ("lse", lse, rows)):
        check_shape(name, x, shape)
        check_device(name, x, q.device)
    # A query's row enters the backward only through its log-sum-exp and the sum of dout *
    # out (FlashAttention-2, arXiv 2307.08691, section 3.1): given those over all keys, the
    # shares of parts add up.
    dq, dk, dv, _ = BACKWARD(dout, None, q, k, v, out, lse, False, *packed)
    return dq, dk, dv


def _packed(tensors: tuple[Tensor, ...], **arguments: Any) -> Packed:
    check_tensors(BATCH, tensors)
    return pack(options_of(sizes_of(BATCH, tensors), Requested(**arguments)))


def merge_attention(partials: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge the attention of the same queries over disjoint parts of the keys into
    (out, lse) over all keys.

    lse = log(sum of exp(lse_i)), out = sum of exp(lse_i - lse) out_i (FlashAttention, arXiv
    2205.14135, section 3.1), in float32 (float64 if an input is), out returned in the outs' widest
    dtype. A part in which a row sees no key (lse -inf) adds nothing; if no part does, out is 0 and
    lse -inf. Differentiable in every out and lse.

    Args:
        partials: pairs (out (B, S, H, D), lse (B, H, S)), or of a packed row (out (T, H, D), lse
            (H, T)); at least one, all of one shape and device.

    Raises:
        TypeError, ValueError: the message names the argument.
    """
    _check(partials)
    outs, lses = [out for out, _ in partials], [lse for _, lse in partials]
    dtype, exact = outs[0].dtype, torch.float32
    for x in outs:
        dtype = torch.promote_types(dtype, x.dtype)
    for x in (*outs, *lses):
        exact = torch.promote_types(exact, x.dtype)
    parts = torch.stack([lse.to(exact) for lse in lses])
    highest = parts.detach().amax(0)
    # Where no part saw anything, 0 instead of -inf: -inf - -inf would be NaN, here
    # and in the gradient.
    highest = torch.where(highest == -torch.inf, 0.0, highest)
    weights = torch.exp(parts - highest)
    total = weights.sum(0)
    seen = (total > 0) | total.isnan()
    safe = torch.where(seen, total, 1.0)
    lse = torch.where(seen, highest + torch.log(safe), -torch.inf)
    merged = torch.zeros((), dtype=exact, device=outs[0].device)
    for out, part, weight in zip(outs, parts, weights / safe, strict=True):
        # What a row that saw nothing holds does not matter, not even if it is NaN.
        value = torch.where(_like_out(part == -torch.inf), 0.0, out.to(exact))
        merged = merged + _like_out(weight) * value
    return merged.to(dtype), lse


@torch.no_grad()
def merge_attention_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge attention over further keys into (out, lse) in place: merge_attention of two
    parts, without autograd.

    On a GPU one kernel does it, which touches only the rows that see a key of the part.

    Args:
        out: (B, S, H, D), at least float32, what is computed in; its last stride is 1.
        lse: (B, H, S) of the same dtype, with last stride 1; -inf, and out 0, in rows
            that have seen no key yet.
        part_out, part_lse: the part, from `attention_forward`; out is 0 and lse -inf in rows
            that see none of its keys.
    """
    if dispatch.runs_kernels(out.device):
        # Triton is imported only where it is used.
        from .backends.portable.merge import merge_launch

        with on_device(out.device):
            merge_launch(out, lse, part_out, part_lse).run()
        return
    highest = torch.maximum(lse, part_lse)
    highest.masked_fill_(highest == -torch.inf, 0.0)  # -inf - -inf would be NaN
    weights = torch.exp(torch.stack((lse, part_lse)) - highest)
    total = weights.sum(0)
    lse.copy_(highest + torch.log(total))
    before, added = weights / total.masked_fill_(total == 0, 1.0)
    out.mul_(_like_out(before)).addcmul_(_like_out(added), part_out)


def _like_out(x: Tensor) -> Tensor:
    """Return lse (B, H, S) or (H, T) as (B, S, H, 1) or (T, H, 1), to broadcast to out."""
    return x.transpose(-1, -2)[..., None]


def _check(partials: Sequence[tuple[Tensor, Tensor]]) -> None:
    if not isinstance(partials, (list, tuple)):
        raise TypeError(
            f"partials must be a sequence of pairs (out, lse), not {type(partials).__name__}"
        )
    if not partials:
        raise ValueError("partials must hold one pair (out, lse) or more, not none")
    for number, pair in enumerate(partials):
        if (
            not isinstance(pair, (list, tuple))
            or len(pair) != 2
            or not all(isinstance(x, Tensor) for x in pair)
        ):
            raise TypeError(
                f"partials[{number}] must be a pair of tensors (out, lse), "
                f"not {type(pair).__name__}"
            )
    first = partials[0][0]
    if first.dim() not in (3, 4):
        raise ValueError(
            "partials[0][0] must have the shape (B, S, H, D) or (T, H, D), "
            f"not {tuple(first.shape)}"
        )
    rows = (*first.shape[:-3], first.shape[-2], first.shape[-3])
    for number, pair in enumerate(partials):
        for place, (x, shape) in enumerate(zip(pair, (first.shape, rows), strict=True)):
            name = f"partials[{number}][{place}]"
            check_dtype(name, x, "(B, S, H, D) or (B, H, S)", FLOATING)
            check_shape(name, x, shape)
            check_device(name, x, first.device, "partials[0][0]")
