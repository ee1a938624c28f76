"""What every way of sharing attention has in common: one layer's inputs on this rank, and the kernels' two passes.

B batch, n tokens a rank holds, m tokens of the ranks that divide the heads, H query heads, K key/value heads, D head
dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flashtrain.distributed.context.bands import BandCall, Part
from flashtrain_kernels import attention_backward, attention_forward
from flashtrain_kernels.masks import Mask


@dataclass(frozen=True)
class Scores:
    """How scores become weights. scale: of q k^T. dropout: probability; seed: (1,) int64, the same on all ranks."""

    scale: float
    dropout: float = 0.0
    seed: Tensor | None = None

    def seed_of(self, first_head: int) -> Tensor | None:
        """The kernels' seed for a call whose head 0 is the model's `first_head`: the same weights are dropped."""
        if self.seed is None:
            return None
        offsets = self.seed.new_zeros(1), self.seed.new_full((1,), first_head)
        return torch.cat((self.seed.reshape(1), *offsets))


class Way(Protocol):
    """One way of computing attention over a sequence that several ranks hold. Every rank must call it alike."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """q (B, n, H, D), k and v (B, n, K, D) of this rank -> out (B, n, H, D), and the log-sum-exp for backward."""

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of this rank's tokens, in the shapes and dtypes of q, k and v."""


def forward(q: Tensor, k: Tensor, v: Tensor, part: Part, scores: Scores, first_head: int = 0) -> tuple[Tensor, Tensor]:
    """(out, lse) of the local attention; 0 and -inf for queries that see nothing."""
    if isinstance(part, Mask):
        return attention_forward(
            q, k, v, mask=part, softmax_scale=scores.scale, dropout_p=scores.dropout,
            dropout_seed=scores.seed_of(first_head),
        )  # fmt: skip
    if len(part) == 1 and part[0].queries == slice(0, q.shape[1]):
        return _band_forward(q, k, v, part[0], scores)
    out = torch.zeros_like(q)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=summing_dtype(q.dtype))
    for band in part:
        out[:, band.queries], lse[:, :, band.queries] = _band_forward(q[:, band.queries], k, v, band, scores)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    part: Part,
    scores: Scores,
    first_head: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the local attention, given out and lse over all keys; dk and dv may be in summing_dtype."""
    if isinstance(part, Mask):
        return attention_backward(
            dout, q, k, v, out, lse, mask=part, softmax_scale=scores.scale, dropout_p=scores.dropout,
            dropout_seed=scores.seed_of(first_head),
        )  # fmt: skip
    if len(part) == 1 and part[0][:2] == (slice(0, q.shape[1]), k.shape[1]):
        return _band_backward(dout, q, k, v, out, lse, part[0], scores)
    dq = torch.zeros_like(q)
    dk, dv = (torch.zeros(x.shape, dtype=summing_dtype(x.dtype), device=x.device) for x in (k, v))
    for band in part:
        own, keys = band.queries, band.keys
        rows = dout[:, own], q[:, own], k, v, out[:, own], lse[:, :, own].contiguous()
        dq[:, own], to_keys, to_values = _band_backward(*rows, band, scores)
        dk[:, :keys] += to_keys
        dv[:, :keys] += to_values
    return dq, dk, dv


def _band_forward(q: Tensor, k: Tensor, v: Tensor, band: BandCall, scores: Scores) -> tuple[Tensor, Tensor]:
    keys = slice(0, band.keys)
    return attention_forward(q, k[:, keys], v[:, keys], window_size=band.window, softmax_scale=scores.scale)


def _band_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: BandCall, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    keys = slice(0, band.keys)
    return attention_backward(
        dout, q, k[:, keys], v[:, keys], out, lse, window_size=band.window, softmax_scale=scores.scale
    )


def summing_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partial results are added up in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)
