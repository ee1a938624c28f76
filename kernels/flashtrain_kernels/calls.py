"""What every public function does once its tensors are checked: make the options, run, give what was asked for.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension, T packed tokens.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import autograd, dispatch, masks, reference, torch_sdpa
from .arguments import (
    Sizes,
    check_dropout,
    check_flag,
    check_softcap,
    softmax_scale_or_default,
)
from .feature_arguments import check_alibi, check_bias, check_mask, check_seed
from .masks import SEQUENCE, Mask
from .masks.documents import check_window
from .options import Options, band, seed_tensor

Result = Tensor | tuple[Tensor, ...]


class Given(NamedTuple):
    """The options of a call as the user gave them, with flash-attn's names."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False
    bias: Tensor | None = None
    mask: Any = None
    dropout_seed: int | Tensor | None = None
    return_lse: bool = False


class Packing(NamedTuple):
    """The sequences of a packed row, checked."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def options_of(given: Given, sizes: Sizes, packing: Packing | None = None) -> Options:
    """Check what was given, in the operators' form. Raises TypeError or ValueError naming the argument."""
    check_dropout(given.dropout_p)
    scale = softmax_scale_or_default(given.softmax_scale, sizes.head_dim)
    for name in ("causal", "deterministic", "return_attn_probs", "return_lse"):
        check_flag(name, getattr(given, name))
    check_window("window_size", given.window_size)
    check_softcap(given.softcap)
    check_seed(given.dropout_seed, sizes.device)
    check_bias(given.bias, sizes)
    check_mask(given.mask, sizes, given.causal, given.window_size)
    if packing is not None and given.mask is not None and not isinstance(given.mask, Mask):
        raise TypeError(f"mask of packed sequences must be a Mask, not {type(given.mask).__name__}")
    check_alibi(given.alibi_slopes, sizes, given.mask)

    mask, (left, right) = given.mask, (None, None)
    if packing is not None and mask is None:
        mask = masks.varlen(
            packing.cu_seqlens_q, packing.cu_seqlens_k, sizes.seqlen_q, sizes.seqlen_k, causal=given.causal,
            window=(given.window_size[0], given.window_size[1]),
        )  # fmt: skip
    elif not isinstance(mask, Mask):
        left, right = band(sizes.seqlen_q, sizes.seqlen_k, given.causal, given.window_size)
    slopes = given.alibi_slopes
    if slopes is not None and slopes.dim() == 2 and slopes.shape[0] == 1:
        slopes = slopes[0]
    bias = given.bias
    options = Options(
        scale=scale,
        left=left,
        right=right,
        softcap=float(given.softcap),
        dropout_p=float(given.dropout_p),
        bias=None if bias is None else bias[(None,) * (4 - bias.dim())],
        alibi_slopes=slopes,
        seed=seed_tensor(given.dropout_seed, sizes.device) if given.dropout_p > 0 else None,
        mask=mask,
        deterministic=given.deterministic,
    )
    return replace(options, mask=_ready(mask, options, sizes)) if isinstance(mask, Mask) else options


def _ready(mask: Mask, options: Options, sizes: Sizes) -> Mask:
    """The mask with its plan, where kernels will read it, and with numbered sequences where they count."""
    if dispatch.implementation_for(sizes.device.type) != "torch":
        mask = mask.planned(sizes.head_dim, sizes.dtype, rich=options.rich)
    slopes = options.alibi_slopes
    if options.dropout_p > 0 or (slopes is not None and slopes.dim() == 2):
        mask = _numbered_by_row(mask, sizes)
    return mask


def _numbered_by_row(mask: Mask, sizes: Sizes) -> Mask:
    """A mask that all rows of the batch share, with sequence numbers that differ from row to row."""
    if sizes.batch == 1 or mask.queries.shape[1] != 1 or sizes.seqlen_q == 0:
        return mask
    rows = mask.queries.expand(-1, sizes.batch, -1)
    sequence = mask.queries[SEQUENCE]
    row = torch.arange(sizes.batch, device=sequence.device, dtype=torch.int32)[:, None]
    numbers = (sequence + row * (sequence.amax() + 1)).to(torch.int32)
    plan = mask.plan
    if plan is not None:
        forward, dq, dkdv = (table.expand(sizes.batch, -1, -1) for table in plan[:3])
        plan = plan._replace(forward=forward, dq=dq, dkdv=dkdv)
    return mask._replace(
        queries=torch.cat([rows[:SEQUENCE], numbers[None], rows[SEQUENCE + 1 :]]),
        keys=None if mask.keys is None else mask.keys.expand(sizes.batch, -1),
        plan=plan,
    )


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of (B, S, heads, D) tensors; lse may be None without with_lse."""
    if dispatch.implementation_for(q.device.type) == "torch":
        return torch_sdpa.attention(q, k, v, options, with_lse)
    return autograd.attention(q, k, v, options)


def attend_qkvpacked(qkv: Tensor, options: Options, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """`attend` on (B, S, 3, H, D)."""
    if dispatch.implementation_for(qkv.device.type) == "torch":
        q, k, v = qkv.unbind(2)
        return torch_sdpa.attention(q, k, v, options, with_lse)
    return autograd.attention_qkvpacked(qkv, options)


def attend_kvpacked(q: Tensor, kv: Tensor, options: Options, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """`attend` on (B, Sq, H, D) and (B, Sk, 2, K, D)."""
    if dispatch.implementation_for(q.device.type) == "torch":
        k, v = kv.unbind(2)
        return torch_sdpa.attention(q, k, v, options, with_lse)
    return autograd.attention_kvpacked(q, kv, options)


def with_lse(given: Given) -> bool:
    return given.return_lse or given.return_attn_probs


def returned(
    given: Given,
    options: Options,
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    packing: Packing | None = None,
) -> Result:
    """out, or (out, lse), or flash-attn's (out, lse, S_dmask); the lse of a packed row is (H, T)."""
    if lse is None or not with_lse(given):
        return out
    shown = lse if packing is None else lse[0]
    if not given.return_attn_probs:
        return out, shown
    return out, shown, signed_probabilities(q, k, lse, options, packing)


@torch.no_grad()
def signed_probabilities(q: Tensor, k: Tensor, lse: Tensor, options: Options, packing: Packing | None = None) -> Tensor:
    """flash-attn's S_dmask, for tests of dropout: (0,) without dropout, else (B, H, Sq, Sk) in q's dtype.

    The attention weights before dropout, with the sign set where dropout dropped them (-0.0 where a weight is 0). For
    packed sequences (N, H, max_seqlen_q, max_seqlen_k), 0 past their ends.
    """
    if options.dropout_p == 0:
        return q.new_empty((0,))
    weights = reference.probabilities(q, k, lse, options).to(q.dtype)
    weights = torch.where(reference.dropout_mask(q.shape, k.shape, options, q.device), weights, -weights)
    if packing is None:
        return weights
    queries, real_queries = _places(packing.cu_seqlens_q, packing.max_seqlen_q, q.shape[1])
    keys, real_keys = _places(packing.cu_seqlens_k, packing.max_seqlen_k, k.shape[1])
    if q.shape[1] == 0 or k.shape[1] == 0:
        return weights.new_zeros((queries.shape[0], q.shape[2], queries.shape[1], keys.shape[1]))
    apart = weights[0][:, queries[:, :, None], keys[:, None, :]].transpose(0, 1)  # (N, H, queries, keys)
    return torch.where((real_queries[:, :, None] & real_keys[:, None, :])[:, None], apart, 0.0)


def _places(cu_seqlens: Tensor, longest: int, total: int) -> tuple[Tensor, Tensor]:
    """(N, longest): the index of each sequence's tokens in the packed row, and which of them exist."""
    index = cu_seqlens[:-1, None] + torch.arange(longest, device=cu_seqlens.device)
    return index.clamp(max=max(total - 1, 0)), index < cu_seqlens[1:, None]
