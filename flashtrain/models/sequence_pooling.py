"""The pooling of a sequence's states into one vector.

Shapes: B batch, S sequence, T packed tokens, N sequences (B where padded), E width, M queries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError


def mean_of_tokens(
    hidden: Tensor, lengths: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Compute the mean state of each sequence's real tokens, in float32; 0 for an empty sequence.

    Args:
        hidden: The encoder's states (B, S, E), or (T, E) of packed tokens.
        lengths: (B,) numbers of real tokens in padded rows (None: no padding).
        cu_seqlens: (N + 1,), 0 and each sequence's end, for packed tokens.

    Returns:
        The mean states, (N, E), in the dtype of `hidden`.
    """
    precise = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if cu_seqlens is None:
        if lengths is None:
            return precise.mean(1).to(hidden.dtype)
        real = real_tokens(hidden.shape[1], lengths)
        total, count = (precise * real[..., None]).sum(1), lengths
    else:
        count = cu_seqlens.diff()
        of = _sequence_of(hidden, cu_seqlens)
        total = precise.new_zeros(len(count) + 1, hidden.shape[1]).index_add(0, of, precise)[:-1]
    return (total / count.clamp(min=1)[:, None]).to(hidden.dtype)


def max_of_tokens(
    hidden: Tensor, lengths: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Compute the maximum (N, E) of each component over a sequence's real tokens;
    arguments: see mean_of_tokens.

    The gradient goes to the first of equal maxima.
    """
    # amax's gradient goes to all elements equal to the result. Under torch.compile that can be
    # none: the backward may compare states that were rounded differently.
    if cu_seqlens is not None:
        return _MAX_OF_SEQUENCES(hidden, cu_seqlens)[0]
    if lengths is None:
        return hidden.max(1).values
    real = real_tokens(hidden.shape[1], lengths)
    return (
        hidden.masked_fill(~real[..., None], -torch.inf)
        .max(1)
        .values.masked_fill((lengths == 0)[:, None], 0)
    )


class AttentionPooling(nn.Module):
    """Attention pooling: the mean of a sequence's states, weighted by the softmax of their
    products with a vector.

    The vector is learned (Lin et al. 2017, arXiv 1703.03130, with one hop).
    """

    def __init__(self, embed: int) -> None:
        super().__init__()
        self.score = nn.Linear(embed, 1, bias=False)

    def forward(self, hidden: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Pool hidden (B, S, E) to (B, E); lengths: (B,) numbers of real tokens, at
        least 1 (None: no padding)."""
        scores = self.score(hidden).to(torch.promote_types(hidden.dtype, torch.float32))
        if lengths is not None:
            padding = ~real_tokens(hidden.shape[1], lengths)[..., None]
            scores = scores.masked_fill(padding, -torch.inf)
            hidden = hidden.masked_fill(padding, 0.0)
        return (torch.softmax(scores, dim=1).to(hidden.dtype) * hidden).sum(dim=1)


class EfficientProbing(nn.Module):
    """Efficient probing (Psomas et al. 2025, arXiv 2506.10178): M learned queries attend to a
    sequence's states, each to an M-th of their values; the results are joined.

    The states are the keys: behind a learned query a projection of keys is redundant.
    """

    def __init__(self, embed: int, queries: int) -> None:
        super().__init__()
        if queries < 1 or embed % queries:
            raise UserError(f"queries={queries} must divide the encoder's width, {embed}.")
        self.queries = nn.Linear(embed, queries, bias=False)
        self.values = nn.Linear(embed, embed, bias=False)

    def forward(
        self, hidden: Tensor, lengths: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Compute (N, E); arguments: see mean_of_tokens."""
        if cu_seqlens is None:  # as packed tokens; those of padding are of no sequence
            count, length = hidden.shape[:2]
            of = torch.arange(count, device=hidden.device)[:, None].expand(-1, length)
            of = of if lengths is None else of.where(real_tokens(length, lengths), count)
            of, hidden = of.flatten(), hidden.flatten(0, 1)
        else:
            of, count = _sequence_of(hidden, cu_seqlens), len(cu_seqlens) - 1
        precise = torch.promote_types(hidden.dtype, torch.float32)
        scores = self.queries(hidden).to(precise) * hidden.shape[-1] ** -0.5
        values = self.values(hidden).to(precise).unflatten(-1, (scores.shape[-1], -1))
        none, fixed = scores.new_zeros(count + 1, scores.shape[1]), scores.detach()
        rows = of[:, None].expand_as(fixed)
        largest = none.scatter_reduce(0, rows, fixed, "amax", include_self=False)
        weights = (scores - largest[of]).exp()
        total = none.index_add(0, of, weights).clamp(min=1e-30)  # at least 1 but for empty ones
        shares = (weights / total[of])[..., None] * values
        pooled = values.new_zeros(count + 1, *values.shape[1:]).index_add(0, of, shares)
        return pooled[:-1].flatten(1).to(hidden.dtype)


def real_tokens(length: int, lengths: Tensor) -> Tensor:
    """Return which tokens of padded rows are real, (B, S) bool, from the padded length
    S and the lengths (B,)."""
    return torch.arange(length, device=lengths.device) < lengths[:, None]


def _sequence_of(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the index (T,) of each token's sequence; tokens past the last end get N, a row that
    callers drop."""
    index = torch.arange(hidden.shape[0], device=hidden.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), index, right=True)


# This is an operator so that its comparison sees the same rounded states whatever
# is compiled around it.
torch.library.define(
    "flashtrain::max_of_sequences",
    "(Tensor hidden, Tensor cu_seqlens) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_MAX_OF_SEQUENCES = torch.ops.flashtrain.max_of_sequences.default


@torch.library.impl("flashtrain::max_of_sequences", ("cpu", "cuda"))
def _max_of_sequences(hidden: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the maxima (N, E), the index of the token with each, int64 (N, E)); the index is T
    for an empty sequence."""
    tokens, embed = hidden.shape
    of = _sequence_of(hidden, cu_seqlens)[:, None].expand_as(hidden)
    values = hidden.new_zeros(len(cu_seqlens), embed).scatter_reduce(
        0, of, hidden, "amax", include_self=False
    )
    index = torch.arange(tokens, device=hidden.device, dtype=torch.int32)[:, None]
    candidates = torch.where((hidden == values.gather(0, of)) | hidden.isnan(), index, tokens)
    places = candidates.new_full((len(cu_seqlens), embed), tokens).scatter_reduce(
        0, of, candidates, "amin"
    )
    return values[:-1].contiguous(), places[:-1].long()


@torch.library.register_fake("flashtrain::max_of_sequences")
def _max_shapes(hidden: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    shape = (cu_seqlens.shape[0] - 1, hidden.shape[1])
    return hidden.new_empty(shape), hidden.new_empty(shape, dtype=torch.int64)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.tokens = inputs[0].shape[0]


def _to_maxima(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    """Scatter the gradients to the maxima; those of empty sequences go to an extra
    row, which is dropped."""
    (places,) = ctx.saved_tensors
    return gradient.new_zeros(ctx.tokens + 1, gradient.shape[1]).scatter(0, places, gradient)[
        :-1
    ], None


torch.library.register_autograd("flashtrain::max_of_sequences", _to_maxima, setup_context=_save)
