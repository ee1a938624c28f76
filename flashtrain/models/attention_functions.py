"""Attention as a function, softmax(q k^T scale) v, in three implementations
that agree up to rounding.

- causal is aligned bottom-right: the last query sees every key, as queries after
  a key/value cache need;
- a mask (flashtrain_kernels.masks, or a BlockMask) replaces `causal` and `window`: it
  is the whole rule of which keys are seen;
- window (left, right): a query sees that many keys before and after its own
  position, -1 for all of them;
- grouped-query attention: query head h reads key/value head h // (H // K);
- dropout is the probability of dropping an attention weight; the others are divided by 1 - dropout.
  Each function draws its own random numbers, so different weights are dropped;
- a query that sees no key gives zeros.

Shapes: B batch, S sequence (Sq queries, Sk keys), H query heads, K key/value heads, D head
dimension, T packed tokens. q (B, Sq, H, D); k and v (B, Sk, K, D); result (B, Sq, H, D).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain_kernels import (
    BlockMask,
    Documents,
    Mask,
    dispatch,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    masks,
)
from flashtrain_kernels.environment import autocast_dtype

AnyMask = Mask | BlockMask
NO_WINDOW = (-1, -1)


class AttentionOptions(NamedTuple):
    """What an attention function computes, besides its tensors; the module's
    docstring says what each means."""

    causal: bool
    scale: float
    mask: AnyMask | None = None
    dropout: float = 0.0
    window: tuple[int, int] = NO_WINDOW


class PackedSequences(NamedTuple):
    """The lengths of sequences packed into one row, for attention functions whose mask
    would be a T x T tensor."""

    # Of the sequences, in their order in the row; tokens after them belong to none.
    lengths: tuple[int, ...]

    def attend(
        self, attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Call attention(q, k, v) for one sequence after the other, so that only one
        sequence's scores are stored.

        q is (1, T, H, D), k and v are (1, T, K, D). The result (1, T, H, D) is 0 at tokens
        after the last sequence.
        """
        sizes = [length for length in self.lengths if length]
        used = sum(sizes)
        parts = (
            zip(*(x[:, :used].split(sizes, dim=1) for x in (q, k, v)), strict=True) if sizes else ()
        )
        rows = [attention(*part) for part in parts]
        rows.append(q.new_zeros(q.shape[0], q.shape[1] - used, *q.shape[2:]))
        return torch.cat(rows, dim=1)


def takes_block_rows(q: Tensor, k: Tensor, v: Tensor, mask: object) -> bool:
    """Return whether block_rows_attention can compute attention with these arguments.

    It needs a BlockMask of whole blocks, without a causal rule or window and the same for
    all rows and heads, no torch.compile, and no gradients (each block of queries would make
    a gradient as large as all keys).
    """
    if not isinstance(mask, BlockMask) or torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    fits = mask.query_rows.shape[:2] == (1, 1) and (mask.seqlen_q, mask.seqlen_k) == (
        q.shape[1],
        k.shape[1],
    )
    whole = mask.seqlen_q % mask.block_size[0] == 0 and mask.seqlen_k % mask.block_size[1] == 0
    return fits and whole and mask.left is None and mask.right is None


def block_rows_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: BlockMask, dropout: float = 0.0
) -> Tensor:
    """Compute block-sparse attention in torch: for each block of queries, with the
    keys that the block sees.

    takes_block_rows must be true of the arguments. This function evaluates block-sparse models on a
    CPU, where our kernels do not run and a dense mask of 65,536 pixels takes 4 GiB.
    """
    size_q, size_k = mask.block_size
    # (B, K, nk, size_k, D).
    keys, values = (tensor.transpose(1, 2).unflatten(2, (-1, size_k)) for tensor in (k, v))
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


def flash_attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Compute attention by flashtrain_kernels, exactly and in memory linear in S
    (FlashAttention, Dao et al. 2022)."""
    causal, scale, mask, dropout, window = options
    causal = causal and mask is None
    out = flash_attn_func(
        q, k, v, dropout, softmax_scale=scale, causal=causal, window_size=window, mask=mask
    )
    return cast(Tensor, out)  # without return_lse it is the output alone


def flash_packed_attention(qkv: Tensor, options: AttentionOptions) -> Tensor:
    """Compute flash_attention from one tensor of queries, keys and values, qkv (B, S, 3,
    H, D), without a copy."""
    causal, scale, mask, dropout, window = options
    causal = causal and mask is None
    out = flash_attn_qkvpacked_func(
        qkv, dropout, softmax_scale=scale, causal=causal, window_size=window, mask=mask
    )
    return cast(Tensor, out)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Compute attention by torch's scaled_dot_product_attention, with an Sq x Sk mask
    where torch needs one."""
    causal, scale, mask, dropout, window = options
    if takes_block_rows(q, k, v, mask):
        return block_rows_attention(
            q, k, v, scale=scale, mask=cast(BlockMask, mask), dropout=dropout
        )
    queries, keys = q.shape[1], k.shape[1]
    # torch aligns is_causal top-left, which is bottom-right only for as many queries as keys.
    plain_causal = causal and mask is None and queries == keys and window == NO_WINDOW
    visible = None if plain_causal else visible_keys(q, k, causal, mask, window)
    unseeing = _queries_without_keys(visible, q, k, mask)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        # A query that sees no key is given all of them, so that no NaN arises; its
        # result is zeroed below.
        attn_mask=visible if visible is None or unseeing is None else visible | unseeing,
        dropout_p=dropout,
        is_causal=plain_causal and queries > 1,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return (out if unseeing is None else out.masked_fill(unseeing, 0.0)).transpose(1, 2)


def standard_attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Compute attention by its formula, which stores the whole Sq x Sk matrix: the
    baseline of Dao et al. 2022."""
    causal, scale, mask, dropout, window = options
    visible = visible_keys(q, k, causal, mask, window)
    unseeing = _queries_without_keys(visible, q, k, mask)
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(-2, -1)) * scale
    if visible is not None:
        # The most negative number, not -inf: a row that is hidden throughout must not become NaN,
        # here or in backward.
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    probabilities = F.dropout(torch.softmax(scores, dim=-1), dropout).to(v.dtype)
    out = probabilities @ v
    return (out if unseeing is None else out.masked_fill(unseeing, 0.0)).transpose(1, 2)


ATTENTION_FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, AttentionOptions], Tensor]] = {
    "flash": flash_attention,
    "sdpa": sdpa_attention,
    "standard": standard_attention,
}


def plan_mask(
    mask: AnyMask | None, x: Tensor, *, attention: str, head_dim: int, dropout: float = 0.0
) -> AnyMask | None:
    """Plan a mask for our kernels (Mask.planned) once per batch, instead of in every layer.

    Args:
        mask: Which tokens each token sees (None: no mask). A BlockMask needs no plan.
        x: The layers' input, which gives the device and, without autocast, the dtype of attention.
        attention: "flash", "sdpa" or "standard". Only "flash" uses plans, and only
            where our kernels run.
        head_dim: The head dimension, D.
        dropout: The probability that attention will be called with (0 in evaluation).

    Returns:
        The mask, with a plan where one is used.
    """
    if (
        mask is None
        or isinstance(mask, BlockMask)
        or attention != "flash"
        or dispatch.implementation_for(x.device.type) == "torch"
    ):
        return mask
    # Autocast leaves float64 alone.
    dtype = x.dtype if x.dtype == torch.float64 else autocast_dtype(x.device.type) or x.dtype
    return mask.planned(head_dim, dtype, rich=dropout > 0)


def padding_mask(length: int, lengths: Tensor) -> Mask:
    """Make the mask of padded rows, without a causal rule: padding sees no
    token and is seen by none.

    Args:
        length: The length of the rows with padding, S.
        lengths: (B,), the number of real tokens of each row, which come first.
    """
    index = torch.arange(length, device=lengths.device)
    ends = torch.where(index < lengths[:, None], lengths[:, None], 0).int()
    return masks.document(Documents(torch.zeros_like(ends), ends), causal=False)


def visible_keys(
    q: Tensor, k: Tensor, causal: bool, mask: AnyMask | None, window: tuple[int, int] = NO_WINDOW
) -> Tensor | None:
    """Return which keys each query sees, (B or 1, 1 or H, Sq, Sk) bool; None where
    every query sees every key."""
    if mask is None:
        if window == NO_WINDOW and (not causal or q.shape[1] == 1):
            return None
        mask = (masks.causal if causal else masks.full)(
            q.shape[1], k.shape[1], device=q.device
        ).within(*window)
    visible = mask.dense() if isinstance(mask, BlockMask) else mask.dense()[:, None]
    if visible.shape[2:] != (q.shape[1], k.shape[1]):
        raise UserError(
            f"the mask is for {tuple(visible.shape[2:])} (queries, keys): expected "
            f"{(q.shape[1], k.shape[1])}, the numbers of queries and keys of this call."
        )
    return visible


def _queries_without_keys(
    visible: Tensor | None, q: Tensor, k: Tensor, mask: AnyMask | None
) -> Tensor | None:
    """The queries that see no key, (B or 1, 1 or H, Sq, 1) bool; None where there cannot be any."""
    if visible is None or (mask is None and q.shape[1] <= k.shape[1]):
        return None
    return ~visible.any(-1, keepdim=True)
