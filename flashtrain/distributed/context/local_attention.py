"""The attention that one rank computes locally.

Shapes: B batch, m queries and p keys on this rank, H query heads, K key/value
heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtrain.distributed.context.indexing import take
from flashtrain.distributed.context.local_mask import Part
from flashtrain_kernels import attention_backward, attention_forward
from flashtrain_kernels.masks import Mask


@dataclass(frozen=True)
class Scores:
    """The options by which attention scores become weights."""

    scale: float  # the factor of q k^T
    dropout: float = 0.0  # the probability of dropping an attention weight
    # Dropout's seed, (1,) int64, the same on all ranks; None: no dropout.
    seed: Tensor | None = None
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: they stay as they are
    # (H,): one more score per query and head, whose value is 0; None: no sinks.
    sinks: Tensor | None = None
    # (H,), to which the backward adds this rank's part of the gradient of `sinks`.
    sink_gradients: Tensor | None = None
    # The model's index of the first head in a call, for calls with some of the heads.
    first_head: int = 0

    def from_head(self, first_head: int) -> Scores:
        """Return these options for a call whose first head is head `first_head` of the model."""
        return replace(self, first_head=first_head)

    @property
    def options(self) -> dict[str, Any]:
        """The kernels' keyword arguments for scale and softcap."""
        return {"softmax_scale": self.scale, "softcap": self.softcap}

    @property
    def dropped(self) -> dict[str, Any]:
        """The kernels' keyword arguments for dropout; calls for some heads drop the same
        weights as a call for all."""
        if self.seed is None:
            return {}
        offsets = self.seed.new_zeros(1), self.seed.new_full((1,), self.first_head)
        return {
            "dropout_p": self.dropout,
            "dropout_seed": torch.cat((self.seed.reshape(1), *offsets)),
        }

    def with_sinks(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return (out, log-sum-exp) over all keys and the sinks from out and lse, which
        are over the keys alone."""
        # They serve the backward over the keys as they are: weights are exp(score - lse), and
        # a sink's value is 0.
        if self.sinks is None:
            return out, lse
        sinks = self.sinks[self._heads(lse)].to(lse.dtype)[None, :, None]
        total = torch.logaddexp(lse, sinks)
        return out * torch.exp(lse - total).transpose(1, 2)[..., None].to(out.dtype), total

    def add_sink_gradients(self, saved: Saved) -> None:
        """Add the sinks' gradient from this call's heads and queries to sink_gradients;
        saved.out, saved.lse: from with_sinks."""
        # The sink's weight, times what a value of 0 is less than the row's output.
        if self.sinks is None or self.sink_gradients is None:
            return
        dout, *_, out, lse = saved
        heads = self._heads(lse)
        weights = torch.exp(self.sinks[heads].to(lse.dtype)[None, :, None] - lse)
        share = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
        self.sink_gradients[heads] -= (weights * share).sum((0, 2)).to(self.sink_gradients.dtype)

    def _heads(self, lse: Tensor) -> slice:
        return slice(self.first_head, self.first_head + lse.shape[1])


class Saved(NamedTuple):
    """What a backward starts from: the gradient of the output, and what the forward read and
    returned, with the log-sum-exp over ALL keys, those of other ranks included."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def of_heads(self, queries: slice, keys: slice) -> Saved:
        """Return these of some query heads and key heads."""
        dout, q, out = (x[:, :, queries] for x in (self.dout, self.q, self.out))
        return Saved(dout, q, self.k[:, :, keys], self.v[:, :, keys], out, self.lse[:, queries])

    def of_queries(self, rows: Tensor | None) -> Saved:
        """Return these of the queries at the indices rows (1, r); None: of all."""
        if rows is None:
            return self
        dout, q, out = (take(x, rows) for x in (self.dout, self.q, self.out))
        return Saved(dout, q, self.k, self.v, out, self.lse.index_select(2, rows[0]))


def forward(q: Tensor, k: Tensor, v: Tensor, part: Part, scores: Scores) -> tuple[Tensor, Tensor]:
    """Compute the attention of this rank's queries to the keys that it has.

    Args:
        q: (B, m, H, D).
        k, v: (B, p, K, D).
        part: which of these keys each of these queries sees (LocalMasks.part).
        scores: how attention scores become weights.

    Returns:
        (out (B, m, H, D), log-sum-exp (B, H, m)); out is 0 and the log-sum-exp -inf for
        queries that see no key.
    """
    calls = forward_calls(q, k, v, part, scores)
    if isinstance(part, Mask) or (len(part) == 1 and part[0].queries == slice(0, q.shape[1])):
        return next(calls)[1:]
    out = torch.zeros_like(q)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=summing_dtype(q.dtype))
    for own, some, rows in calls:
        out[:, own], lse[:, :, own] = some, rows
    return out, lse


def forward_calls(
    q: Tensor, k: Tensor, v: Tensor, part: Part, scores: Scores
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (queries, out and log-sum-exp of these queries) of each kernel call of
    `forward`; arguments as there."""
    for own, keys, options in _calls(part, scores):
        yield own, *attention_forward(q[:, own], k[:, keys], v[:, keys], **options)


def backward(saved: Saved, part: Part, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients (dq, dk, dv) of `forward`; dk and dv may be in summing_dtype. saved: of
    these queries and keys; part, scores: as in `forward`."""
    calls, (_, q, k, v, *_) = backward_calls(saved, part, scores), saved
    if isinstance(part, Mask) or (
        len(part) == 1 and part[0][:2] == (slice(0, q.shape[1]), k.shape[1])
    ):
        return next(calls)[2:]
    dq = torch.zeros_like(q)
    dk, dv = (torch.zeros(x.shape, dtype=summing_dtype(x.dtype), device=x.device) for x in (k, v))
    for own, keys, to_queries, to_keys, to_values in calls:
        dq[:, own] = to_queries
        dk[:, keys].add_(to_keys)
        dv[:, keys].add_(to_values)
    return dq, dk, dv


def backward_calls(
    saved: Saved, part: Part, scores: Scores
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """Yield (queries, keys, their dq, dk and dv) of each kernel call of
    `backward`; arguments as there."""
    dout, q, k, v, out, lse = saved
    for own, keys, options in _calls(part, scores):
        rows = dout[:, own], q[:, own], k[:, keys], v[:, keys], out[:, own]
        yield own, keys, *attention_backward(*rows, lse[:, :, own].contiguous(), **options)


def _calls(part: Part, scores: Scores) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
    """Yield (queries, keys, the kernels' keyword arguments) of each kernel call that computes
    `part`; queries and keys are slices of this rank's."""
    if isinstance(part, Mask):
        yield slice(None), slice(None), {"mask": part, **scores.options, **scores.dropped}
        return
    for own, keys, window in part:
        yield own, slice(keys), {"window_size": window, **scores.options}


def summing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results are summed: at least float32."""
    return torch.promote_types(dtype, torch.float32)
