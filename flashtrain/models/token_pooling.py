"""From the states of padded or packed sequences to one vector each: the mean or the largest over the real tokens.

B batch, S sequence, T packed tokens, N sequences (B of padded ones), E embedding width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mean_of_tokens(hidden: Tensor, lengths: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """The mean state (N, E) of each sequence's real tokens; 0 of a sequence without any.

    hidden (B, S, E), with lengths (B,) where rows are padded; or (T, E) with cu_seqlens (N + 1,).
    """
    precise = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if cu_seqlens is None:
        if lengths is None:
            return precise.mean(1).to(hidden.dtype)
        real = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]
        total, count = (precise * real[..., None]).sum(1), lengths
    else:
        count = cu_seqlens.diff()
        of = _sequence_of(hidden, cu_seqlens)
        total = precise.new_zeros(len(count) + 1, hidden.shape[1]).index_add(0, of, precise)[:-1]
    return (total / count.clamp(min=1)[:, None]).to(hidden.dtype)


def max_of_tokens(hidden: Tensor, lengths: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """The largest of each component (N, E) over a sequence's real tokens; 0 of a sequence without any. See mean.

    The gradient goes to the place that was found, the first of equals. (amax's goes to all that equal the result, and
    under torch.compile none may: the backward can see states that were not rounded as those it compares them with.)
    """
    if cu_seqlens is not None:
        return _LARGEST(hidden, cu_seqlens)[0]
    if lengths is None:
        return hidden.max(1).values
    real = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]
    return hidden.masked_fill(~real[..., None], -torch.inf).max(1).values.masked_fill((lengths == 0)[:, None], 0)


def _sequence_of(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Which sequence each token (T, E) is of, (T,); what follows the last end counts to one more, to be left out."""
    index = torch.arange(hidden.shape[0], device=hidden.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), index, right=True)


# An operator, so that the comparison inside sees the same rounded states whatever is compiled around it.
torch.library.define(
    "flashtrain::largest_of_sequences",
    "(Tensor hidden, Tensor cu_seqlens) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LARGEST = torch.ops.flashtrain.largest_of_sequences.default


@torch.library.impl("flashtrain::largest_of_sequences", ("cpu", "cuda"))
def _largest(hidden: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The largest values (N, E) and the tokens that have them, int64 (N, E); T for a sequence without tokens."""
    tokens, embed = hidden.shape
    of = _sequence_of(hidden, cu_seqlens)[:, None].expand_as(hidden)
    values = hidden.new_zeros(len(cu_seqlens), embed).scatter_reduce(0, of, hidden, "amax", include_self=False)
    index = torch.arange(tokens, device=hidden.device, dtype=torch.int32)[:, None]
    candidates = torch.where((hidden == values.gather(0, of)) | hidden.isnan(), index, tokens)
    places = candidates.new_full((len(cu_seqlens), embed), tokens).scatter_reduce(0, of, candidates, "amin")
    return values[:-1].contiguous(), places[:-1].long()


@torch.library.register_fake("flashtrain::largest_of_sequences")
def _largest_shapes(hidden: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    shape = (cu_seqlens.shape[0] - 1, hidden.shape[1])
    return hidden.new_empty(shape), hidden.new_empty(shape, dtype=torch.int64)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.tokens = inputs[0].shape[0]


def _spread(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    """To each place its gradient; those of sequences without tokens go to a row behind the last, and are left out."""
    (places,) = ctx.saved_tensors
    return gradient.new_zeros(ctx.tokens + 1, gradient.shape[1]).scatter(0, places, gradient)[:-1], None


torch.library.register_autograd("flashtrain::largest_of_sequences", _spread, setup_context=_save)
