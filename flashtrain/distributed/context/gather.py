"""All-gather of keys and values, some heads at a time: the next heads come while these are computed.

As in Llama 3's context parallelism (Grattafiori et al. 2024, arXiv 2407.21783, section 3.3.2), with the gather in
pieces. Each rank computes its own queries against the whole sequence's keys, which the gather puts into the sequence's
order; the gradients of keys and values are added up over the ranks by a reduce-scatter in float32.

B batch, n tokens a rank holds, R ranks, S sequence, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flashtrain.distributed.context import call
from flashtrain.distributed.context.bands import local_part
from flashtrain.distributed.context.call import Scores, summing_dtype
from flashtrain.distributed.context.group import ContextGroup
from flashtrain.distributed.context.layout import Layout
from flashtrain.distributed.context.places import take
from flashtrain.distributed.context.transfers import Piece, Transfer, pieces_of
from flashtrain_kernels import Mask

# torch 2.13 renamed both and warns at the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Coming(NamedTuple):
    """What is under way between the ranks, and what becomes of it when it is there: keys and values in the sequence's
    order, (B, S, heads, D) each, or this rank's parts (B, n, heads, D) of the sums of their gradients."""

    transfer: Transfer
    result: Callable[[], Sequence[Tensor]]


class GatherKeys:
    """Keys and values gathered from all ranks.

    mask: of the whole sequence; plan: makes a part of it ready for the kernels.
    """

    def __init__(self, layout: Layout, group: ContextGroup, mask: Mask, plan: Any) -> None:
        device = mask.queries.device
        self.group = group.group
        self.size = group.size
        self.places = layout.places.to(device)
        tokens = layout.tokens.flatten(1).to(device)
        self.dealt = tokens.clamp(min=0)
        self.padding = (tokens < 0)[..., None, None, None] if layout.padding else None
        self.part = plan(local_part(mask, layout.tokens[:, group.rank], None))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """See Way. The log-sum-exp is of this rank's tokens, (B, H, n)."""
        outs, lses = [], []
        pieces = self._pieces(q, k)
        coming = self._gather(k, v, pieces[0])
        for index, piece in enumerate(pieces):
            keys, values = coming.result()
            if index + 1 < len(pieces):
                coming = self._gather(k, v, pieces[index + 1])
            out, lse = call.forward(q[:, :, piece.queries], keys, values, self.part, scores, piece.queries.start)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs, 2), torch.cat(lses, 1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Way."""
        pieces = self._pieces(q, k)
        coming = self._gather(k, v, pieces[0])
        dqs: list[Tensor] = []
        sums: list[Coming] = []
        for index, piece in enumerate(pieces):
            keys, values = coming.result()
            if index + 1 < len(pieces):
                coming = self._gather(k, v, pieces[index + 1])
            own = piece.queries
            dq, dk, dv = call.backward(
                dout[:, :, own], q[:, :, own], keys, values, out[:, :, own], lse[:, own].contiguous(), self.part,
                scores, own.start,
            )  # fmt: skip
            dqs.append(dq)
            if sums:
                sums[-1].transfer.arrived()  # made while this piece was computed; what was sent is no longer needed
            sums.append(self._reduce(dk, dv))
        dks, dvs = zip(*(x.result() for x in sums), strict=True)
        return torch.cat(dqs, 2), torch.cat(dks, 2).to(k.dtype), torch.cat(dvs, 2).to(v.dtype)

    def _pieces(self, q: Tensor, k: Tensor) -> list[Piece]:
        """The heads that go together; the same on every rank."""
        return pieces_of(q.shape[2], k.shape[2])

    def _gather(self, k: Tensor, v: Tensor, piece: Piece) -> Coming:
        """Start gathering some heads of all ranks' keys and values."""
        held = torch.stack((k[:, :, piece.keys], v[:, :, piece.keys]), 2)
        gathered = held.new_empty((self.size * held.shape[0], *held.shape[1:]))
        work = _all_gather(gathered, held, group=self.group, async_op=True)
        transfer = Transfer(gathered.unflatten(0, (self.size, -1)), held, [work])
        return Coming(transfer, lambda: take(transfer.arrived().movedim(0, 1).flatten(1, 2), self.places).unbind(2))

    def _reduce(self, keys: Tensor, values: Tensor) -> Coming:
        """Start adding up gradients (B, S, heads, D) over the ranks: each gets those of its tokens."""
        dealt = take(torch.stack((keys, values), 2), self.dealt).to(summing_dtype(keys.dtype))
        if self.padding is not None:
            dealt = dealt.masked_fill(self.padding, 0)
        sent = dealt.unflatten(1, (self.size, -1)).movedim(1, 0).flatten(0, 1).contiguous()
        received = sent.new_empty((sent.shape[0] // self.size, *sent.shape[1:]))
        transfer = Transfer(received, sent, [_reduce_scatter(received, sent, group=self.group, async_op=True)])
        return Coming(transfer, lambda: transfer.arrived().unbind(2))
