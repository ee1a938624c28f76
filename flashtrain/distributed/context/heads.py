"""The methods all-to-all, ring and hybrid, the last being both: ranks that divide the heads, and rings of such ranks.

In the all-to-all (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509) every rank computes all tokens for some of
the heads, with the unchanged kernel and mask. In a ring, keys and values go from rank to rank while each computes on
what it has (LightSeq / DistFlashAttn, Li et al. 2023, arXiv 2310.03294; Ring Attention, Liu et al. 2023, arXiv
2310.01889). Partial results are merged by their log-sum-exp in float32; in the backward the gradients of keys and
values travel with them, and are back at their rank after the last step. The hybrid is USP's (Fang and Zhao 2024, arXiv
2405.07719): 12 heads on 8 ranks as 4 x 2.

B batch, n tokens a rank holds, U ranks that divide the heads, m tokens these hold together, H query heads, K key/value
heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flashtrain.distributed.context import local_attention
from flashtrain.distributed.context.exchange import ContextGroup, Piece, Transfer, ascending, inverse, pieces_of, take
from flashtrain.distributed.context.layout import Layout
from flashtrain.distributed.context.local_attention import Part, Scores, local_part, summing_dtype
from flashtrain_kernels import Mask

_KEYS, _GRADIENTS = 1, 2  # tags: both streams are under way between the same two ranks at once


class Ring:
    """A ring of ranks. parts[j]: what this rank's queries see of the keys that rank j of the ring holds."""

    def __init__(self, group: Any, parts: Sequence[Part]) -> None:
        self.group = group
        self.parts = parts
        self.size = len(parts)
        self.rank = dist.get_rank(group) if self.size > 1 else 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, first_head: int = 0) -> tuple[Tensor, Tensor]:
        """q (B, m, H, D), k and v (B, m, K, D) -> out (B, m, H, D) in q's dtype and lse (B, H, m) over all keys."""
        if self.size == 1:
            out, lse = local_attention.forward(q, k, v, self.parts[0], scores, first_head)
            return scores.with_sinks(out, lse, first_head)
        held = torch.stack((k, v))
        merged: tuple[Tensor, Tensor] | None = None
        for step in range(self.size):
            coming = self._send_on(held, _KEYS) if step + 1 < self.size else None
            out, lse = local_attention.forward(q, held[0], held[1], self._part(step), scores, first_head)
            if merged is None:
                merged = out.to(summing_dtype(out.dtype)), lse
            else:
                merged = _merge(*merged, out, lse)
            del out  # not there beside the next part's
            if coming is not None:
                held = coming.arrived()
        assert merged is not None
        out, lse = scores.with_sinks(*merged, first_head)
        return out.to(q.dtype), lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scores: Scores,
        first_head: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv), given what `forward` returned; partial gradients are added up in float32."""
        scores.add_sink_gradients(dout, out, lse, first_head)
        if self.size == 1:
            return local_attention.backward(dout, q, k, v, out, lse, self.parts[0], scores, first_head)
        dtype = summing_dtype(q.dtype)
        held = torch.stack((k, v))
        dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
        travelling: Transfer | None = None
        for step in range(self.size):
            coming = self._send_on(held, _KEYS) if step + 1 < self.size else None
            part, *own = local_attention.backward(
                dout, q, held[0], held[1], out, lse, self._part(step), scores, first_head
            )
            dq += part
            # What the ranks before added for the same keys, to which this one's gradients are added where they lie.
            gradients = torch.zeros_like(held, dtype=dtype) if travelling is None else travelling.arrived()
            gradients[0] += own[0]
            gradients[1] += own[1]
            travelling = self._send_on(gradients, _GRADIENTS)
            del part, own, gradients  # none is there beside the next part's, but for what is being sent
            if coming is not None:
                held = coming.arrived()
        assert travelling is not None
        dk, dv = travelling.arrived().to(k.dtype)
        return dq.to(q.dtype), dk, dv

    def _part(self, step: int) -> Part:
        """Keys come from the rank before: at step s those of rank r - s are here."""
        return self.parts[(self.rank - step) % self.size]

    def _send_on(self, x: Tensor, tag: int) -> Transfer:
        """Start sending x to the next rank and receiving its like from the one before."""
        received = torch.empty_like(x)
        after, before = ((self.rank + hop) % self.size for hop in (1, -1))
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=self.group, tag=tag, group_peer=after),
                dist.P2POp(dist.irecv, received, group=self.group, tag=tag, group_peer=before),
            ]
        )
        return Transfer(received, x, works)


class HeadsAndRings:
    """Divides the heads over `heads_degree` neighbouring ranks, and passes keys and values around the rest.

    mask: of the whole sequence; plan: makes a part of it ready for the kernels. dropout: whether weights are dropped.
    """

    def __init__(
        self, layout: Layout, group: ContextGroup, heads_degree: int, mask: Mask, plan: Any, *, dropout: bool
    ) -> None:
        self.degree = heads_degree
        self.padded = layout.padding > 0
        self.group, ring_group = group.parts(heads_degree)
        device = mask.queries.device
        rings = group.size // heads_degree
        mine = group.rank // heads_degree
        if rings == 1:
            # All tokens come together: in the sequence's own order, without padding, under the mask itself.
            self.order: Tensor | None = layout.places.to(device)
            self.back: Tensor | None = inverse(self.order, layout.degree * layout.held)
            self.ring = Ring(None, [plan(local_part(mask, None, None, positions=dropout))])
            return
        tokens = [_held_by(layout, ring, heads_degree) for ring in range(rings)]
        order = ascending(tokens[mine])
        together = heads_degree > 1
        self.order = order.to(device) if together else None
        self.back = inverse(order, order.shape[1]).to(device) if together else None
        held = [each.gather(1, ascending(each)).to(device) for each in tokens]
        parts = [plan(local_part(mask, held[mine], keys, positions=dropout)) for keys in held]
        self.ring = Ring(ring_group, parts)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """See Way. The log-sum-exp is of this rank's heads and all their tokens, (B, H / U, m)."""
        if self.degree == 1:
            return self.ring.forward(q, k, v, scores)
        k, v = self._repeated(k, v)
        pieces = self._pieces(q, k)
        coming = self._to_heads(pieces[0], q, k, v)
        leaving: list[_Exchange] = []
        lses = []
        for index, piece in enumerate(pieces):
            own_q, own_k, own_v = self._of_heads(coming)
            if index + 1 < len(pieces):
                coming = self._to_heads(pieces[index + 1], q, k, v)
            first = self._first_head(q) + piece.queries.start
            out, lse = self.ring.forward(own_q, own_k, own_v, scores, first)
            self._leave(leaving, out)
            lses.append(lse)
        return self._of_tokens(leaving)[0], torch.cat(lses, 1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Way."""
        if self.degree == 1:
            return self.ring.backward(dout, q, k, v, out, lse, scores)
        kv_heads = k.shape[2]
        k, v = self._repeated(k, v)
        pieces = self._pieces(q, k)
        # Exchanged anew instead of being kept: it costs a fraction of the computing, and no memory between the passes.
        coming = self._to_heads(pieces[0], q, k, v, out, dout)
        leaving: list[_Exchange] = []
        for index, piece in enumerate(pieces):
            own_q, own_k, own_v, own_out, own_dout = self._of_heads(coming)
            if index + 1 < len(pieces):
                coming = self._to_heads(pieces[index + 1], q, k, v, out, dout)
            first = self._first_head(q) + piece.queries.start
            rows = lse[:, piece.queries].contiguous()
            gradients = self.ring.backward(own_dout, own_q, own_k, own_v, own_out, rows, scores, first)
            self._leave(leaving, *gradients)
        dq, dk, dv = self._of_tokens(leaving)
        return dq, _summed(dk, kv_heads), _summed(dv, kv_heads)

    def _pieces(self, q: Tensor, k: Tensor) -> list[Piece]:
        """Of a rank's own heads: a piece is exchanged while the one before is computed. One where a ring is busy with
        communication of its own."""
        heads, kv_heads = q.shape[2] // self.degree, k.shape[2] // self.degree
        if self.ring.size > 1:
            return [Piece(slice(0, kv_heads), slice(0, heads))]
        return pieces_of(heads, kv_heads)

    def _first_head(self, q: Tensor) -> int:
        return dist.get_rank(self.group) * (q.shape[2] // self.degree)

    def _repeated(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Key/value heads repeated until every rank gets as many, each right for its query heads."""
        heads = tensors[0].shape[2]
        copies = math.lcm(heads, self.degree) // heads
        return tuple(x if copies == 1 else x.repeat_interleave(copies, 2) for x in tensors)

    def _to_heads(self, piece: Piece, q: Tensor, k: Tensor, v: Tensor, *like_q: Tensor) -> _Exchange:
        """Start exchanging this rank's tokens of all heads (B, n, heads, D) for all tokens of a piece of its heads."""
        chosen = [(q, piece.queries), (k, piece.keys), (v, piece.keys), *((x, piece.queries) for x in like_q)]
        apart = [x.unflatten(2, (self.degree, -1))[:, :, :, heads] for x, heads in chosen]
        return self._exchange(torch.cat(apart, 3).movedim(2, 0), [x.shape[3] for x in apart])

    def _of_heads(self, exchange: _Exchange) -> list[Tensor]:
        """The tensors (B, m, heads of the piece, D), tokens ascending."""
        joined = exchange.transfer.arrived().movedim(0, 1).flatten(1, 2)  # from (U, B, n, heads of all, D)
        if self.order is not None:
            joined = take(joined, self.order)
        return list(joined.split(exchange.counts, 2))

    def _leave(self, leaving: list[_Exchange], *tensors: Tensor) -> None:
        """Start the way back of tensors (B, m, heads of a piece, D), after that of the pieces before."""
        if leaving:
            leaving[-1].transfer.arrived()  # it left while this piece was computed: what was sent is no longer needed
        joined = torch.cat(tensors, 2) if len(tensors) > 1 else tensors[0]
        if self.back is not None:
            joined = _put_back(joined, self.back) if self.padded else take(joined, self.back)
        parts = joined.unflatten(1, (self.degree, -1)).movedim(1, 0)
        leaving.append(self._exchange(parts, [x.shape[2] for x in tensors]))

    def _of_tokens(self, exchanges: list[_Exchange]) -> list[Tensor]:
        """The tensors (B, n, heads, D) of all pieces together."""
        found = [exchange.transfer.arrived().split(exchange.counts, 3) for exchange in exchanges]
        return [torch.cat(parts, 3).movedim(0, 2).flatten(2, 3) for parts in zip(*found, strict=True)]

    def _exchange(self, x: Tensor, counts: list[int]) -> _Exchange:
        """Start an exchange of x (U, ...): piece u goes to rank u; piece u of the result comes from it."""
        sent = x.contiguous()
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        return _Exchange(Transfer(received, sent, [work]), counts)


class _Exchange(NamedTuple):
    """counts: heads of each of the tensors that go together."""

    transfer: Transfer
    counts: list[int]


def _merge(merged: Tensor, lse: Tensor, out: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """flashtrain_kernels.merge_attention of (merged, lse) and (out, part) into merged (B, m, H, D), which is float32 or
    float64. Nothing as large is made beside: six such tensors would be more than all else that a layer's attention
    needs. A row that a part saw nothing of is 0 in it, with a log-sum-exp of -inf."""
    highest = torch.maximum(lse, part)
    highest.masked_fill_(highest == -torch.inf, 0.0)  # -inf - -inf would be NaN
    weights = torch.exp(torch.stack((lse, part)) - highest)
    total = weights.sum(0)
    before, added = (weights / total.masked_fill(total == 0, 1.0)).transpose(2, 3)[..., None]
    merged.mul_(before).addcmul_(added, out)
    return merged, highest + torch.log(total)


def _held_by(layout: Layout, ring: int, degree: int) -> Tensor:
    """(Bl, U * n): the tokens of the ranks of one ring index, one rank after the other."""
    return layout.tokens[:, ring * degree : (ring + 1) * degree].flatten(1)


def _put_back(x: Tensor, back: Tensor) -> Tensor:
    """x (B, m, heads, D) at back (Bl, length), 0 where that is -1."""
    return take(x, back.clamp(min=0)).masked_fill((back < 0)[..., None, None], 0)


def _summed(gradient: Tensor, heads: int) -> Tensor:
    """The gradient of repeated heads (B, n, copies * heads, D) -> (B, n, heads, D)."""
    if gradient.shape[2] == heads:
        return gradient
    return gradient.unflatten(2, (heads, -1)).sum(3, dtype=summing_dtype(gradient.dtype)).to(gradient.dtype)
