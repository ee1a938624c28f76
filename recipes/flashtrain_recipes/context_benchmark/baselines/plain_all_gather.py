"""A plain all-gather: keys and values are gathered at once for one call of flashtrain's
kernel, and one reduce-scatter sums the gradients, in the inputs' dtype; communication and
computation do not overlap.

B batch (1), S sequence, n tokens a rank holds, K key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtrain.distributed.context import local_attention
from flashtrain.distributed.context.all_gather import all_gather_single, reduce_scatter_single
from flashtrain.distributed.context.indexing import take
from flashtrain.distributed.context.layout import Layout
from flashtrain.distributed.context.local_attention import Saved, Scores
from flashtrain.distributed.context.local_mask import LocalMasks, Part
from flashtrain.distributed.context.traffic import Traffic
from flashtrain_recipes.context_benchmark.baseline import Attention, ContextBaseline, Place


class PlainAllGather(ContextBaseline):
    """Attention with all keys and values gathered on every rank."""

    def attend(self, place: Place, q: Tensor, k: Tensor, v: Tensor) -> Attention:
        layout, team, one = place.layout(self.layout), place.team, place.case.attention
        part = LocalMasks(place.mask, 1, one.head_dim, one.dtype).part(
            layout.tokens[:, team.rank], None
        )
        gathered = _Gathered(layout, team.group.group, part, Scores(one.scale), team.device)
        tokens = (place.case.degree - 1) * layout.held
        sent = tokens * 2 * one.kv_heads * one.head_dim * one.dtype.itemsize
        return Attention(lambda q, k, v: _Plain.apply(q, k, v, gathered), Traffic(sent, 2 * sent))


class _Gathered:
    # part: what this rank's queries see of all keys in their order
    def __init__(
        self, layout: Layout, group: Any, part: Part, scores: Scores, device: torch.device
    ) -> None:
        self.group, self.part, self.scores = group, part, scores
        self.places = layout.places.to(device)
        self.tokens = layout.tokens.flatten(1).to(device)
        self.degree = layout.degree

    def whole(self, x: Tensor) -> Tensor:
        """Gather the tensors x (B, n, K, D) of all ranks, and return (B, S, K, D), in the order of
        the sequence."""
        gathered = x.new_empty((self.degree * x.shape[0], *x.shape[1:]))
        all_gather_single(gathered, x.contiguous(), group=self.group)
        return take(
            gathered.unflatten(0, (self.degree, -1)).movedim(0, 1).flatten(1, 2), self.places
        )

    def own(self, x: Tensor) -> Tensor:
        """Sum x (B, S, K, D) over the ranks, and return the sum at this rank's tokens,
        (B, n, K, D)."""
        sharded = take(x, self.tokens.clamp(min=0)).masked_fill(
            (self.tokens < 0)[..., None, None], 0
        )
        sent = sharded.unflatten(1, (self.degree, -1)).movedim(1, 0).flatten(0, 1).contiguous()
        received = sent.new_empty((sent.shape[0] // self.degree, *sent.shape[1:]))
        reduce_scatter_single(received, sent, group=self.group)
        return received


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, gathered: _Gathered) -> Tensor:
        out, lse = local_attention.forward(
            q, gathered.whole(k), gathered.whole(v), gathered.part, gathered.scores
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.gathered = gathered
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple:
        q, k, v, out, lse = ctx.saved_tensors
        gathered: _Gathered = ctx.gathered
        keys, values = gathered.whole(k), gathered.whole(v)
        saved = Saved(dout, q, keys, values, out, lse)
        dq, dk, dv = local_attention.backward(saved, gathered.part, gathered.scores)
        return dq, gathered.own(dk.to(k.dtype)), gathered.own(dv.to(v.dtype)), None


BASELINES = (PlainAllGather("plain-all-gather", "plain all-gather", "zigzag"),)
