"""The all-gather: each rank computes its own queries against keys that it
gathered from the other ranks.

Shapes: B batch, S sequence, R ranks, n tokens a rank holds, m tokens it receives, w tokens it
sends, p keys it has after the exchange, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flashtrain.distributed.context import local_attention
from flashtrain.distributed.context.group import ContextGroup
from flashtrain.distributed.context.indexing import ascending, inverse, put, take, take_into
from flashtrain.distributed.context.layout import Layout
from flashtrain.distributed.context.local_attention import Saved, Scores, summing_dtype
from flashtrain.distributed.context.local_mask import LocalMasks, Part
from flashtrain.distributed.context.needed_keys import Needed, outward_queries, own_keys
from flashtrain.distributed.context.transfers import (
    MAX_PIECES,
    Piece,
    Transfer,
    overlapped,
    pieces_of,
)

# What must come to a rank for each further piece. The copies and launches of one more took up to 2
# ms, forward and backward, on two H200s (context-documents-two-gpus-h200.json): as long as some 250
# MiB take there and back.
PIECE_BYTES = 256 << 20
# The largest share of outward queries that are copied apart: with more, the copies take too
# much memory and time.
MOST_OUTWARD = 0.5
Arriving = Iterator[tuple[Piece, Any]]  # pieces of heads, each with its keys and values
# torch 2.13 renamed both and warns at the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AllGather:
    """Context parallelism by gathering all keys and values, some heads at a time; the next
    heads arrive meanwhile.

    This is Llama 3's context parallelism (Grattafiori et al. 2024, arXiv 2407.21783,
    section 3.3.2). The gradients of keys and values are summed over the ranks by a
    reduce-scatter in float32.

    Args:
        layout: which rank holds which tokens.
        group: the ranks that share the sequence.
        local_masks: makes this rank's part of the mask of the whole sequence.
    """

    def __init__(self, layout: Layout, group: ContextGroup, local_masks: LocalMasks) -> None:
        device = local_masks.device
        self.group = group.group
        self.size = group.size
        tokens = layout.tokens.flatten(1).to(device)
        self.places = ascending(tokens)[:, : layout.seqlen]
        self.held_tokens = tokens.clamp(min=0)
        self.padding = (tokens < 0)[..., None, None, None] if layout.padding else None
        self.part = local_masks.part(layout.tokens[:, group.rank], None)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Return (out (B, n, H, D), log-sum-exp (B, H, n)) of this rank's queries
        over the whole sequence.

        q (B, n, H, D), k and v (B, n, K, D) are of this rank's tokens; scores: scale,
        dropout and other options.
        """
        return scores.with_sinks(*self._outputs(q, self._arriving(q, k, v), self.part, scores))

    def backward(self, saved: Saved, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of this rank's tokens; saved: from `forward`."""
        _, q, k, v, *_ = saved
        scores.add_sink_gradients(saved)
        dq, sums = self._gradients(saved, self._arriving(q, k, v), self.part, scores)
        dks, dvs = zip(*(x.result() for x in sums), strict=True)
        return dq, _whole(dks).to(k.dtype), _whole(dvs).to(v.dtype)

    def _outputs(
        self, q: Tensor, arriving: Arriving, part: Part, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Return (out, log-sum-exp) of these queries over keys and values that arrive some heads
        at a time."""
        outs, lses = [], []
        for piece, (keys, values) in arriving:
            own = piece.queries
            out, lse = local_attention.forward(
                q[:, :, own], keys, values, part, scores.from_head(own.start)
            )
            outs.append(out)
            lses.append(lse)
        return _whole(outs), torch.cat(lses, 1)

    def _gradients(
        self, saved: Saved, arriving: Arriving, part: Part, scores: Scores
    ) -> tuple[Tensor, list[Transfer]]:
        """Return dq of these queries, and for each piece of heads the transfer that sums its dk
        and dv over the ranks."""
        dqs: list[Tensor] = []
        sums: list[Transfer] = []
        for piece, (keys, values) in arriving:
            of_heads = saved.of_heads(piece.queries, piece.keys)._replace(k=keys, v=values)
            own_scores = scores.from_head(piece.queries.start)
            dq, dk, dv = local_attention.backward(of_heads, part, own_scores)
            dqs.append(dq)
            if sums:
                # It was summed while this piece was computed: what was sent is no longer needed.
                sums[-1].wait()
            sums.append(self._reduce(dk, dv))
        return _whole(dqs), sums

    def _arriving(self, q: Tensor, k: Tensor, v: Tensor) -> Arriving:
        """Start gathering, and return an iterator over (piece of heads, its keys and values)."""
        return overlapped(self._pieces(q, k), partial(self._gather, k, v))

    def _pieces(self, q: Tensor, k: Tensor) -> list[Piece]:
        """Divide the heads into the pieces that are gathered one by one; the same on every rank."""
        return pieces_of(q.shape[2], k.shape[2])

    def _gather(self, k: Tensor, v: Tensor, piece: Piece) -> Transfer:
        """Start gathering a piece's heads of all ranks' keys and values; the result is (keys,
        values), each (B, S, heads, D) in the sequence's order."""
        own = torch.stack((k[:, :, piece.keys], v[:, :, piece.keys]), 2)
        gathered = own.new_empty((self.size * own.shape[0], *own.shape[1:]))
        work = all_gather_single(gathered, own, group=self.group, async_op=True)
        return Transfer(gathered, own, [work], self._in_order)

    def _in_order(self, gathered: Tensor) -> Sequence[Tensor]:
        of_ranks = gathered.unflatten(0, (self.size, -1)).movedim(0, 1)
        return take(of_ranks.flatten(1, 2), self.places).unbind(2)

    def _reduce(self, keys: Tensor, values: Tensor) -> Transfer:
        """Start summing gradients of keys and values (B, S, heads, D) over the ranks; the result
        is (dk, dv) of this rank's tokens, each (B, n, heads, D)."""
        summed = take(torch.stack((keys, values), 2), self.held_tokens).to(
            summing_dtype(keys.dtype)
        )
        if self.padding is not None:
            summed = summed.masked_fill(self.padding, 0)
        sent = summed.unflatten(1, (self.size, -1)).movedim(1, 0).flatten(0, 1).contiguous()
        received = sent.new_empty((sent.shape[0] // self.size, *sent.shape[1:]))
        work = reduce_scatter_single(received, sent, group=self.group, async_op=True)
        return Transfer(received, sent, [work], lambda x: x.unbind(2))


class AllGatherNeeded(AllGather):
    """Context parallelism by gathering only the keys and values that this rank's queries see
    (packed documents: few).

    This is MagiAttention's group-cast and group-reduce (SandAI 2025,
    https://github.com/SandAI-org/MagiAttention). Ranks send each other different numbers of tokens;
    large exchanges are divided by heads. Outward queries, which see a key of another rank, are
    copied and computed over the fetched keys; the other queries are computed over the rank's own
    keys meanwhile. Where most queries are outward, all are computed over the fetched keys. The
    gradients return in the kernels' dtype, and are summed in at least float32, rank by rank.

    Args:
        layout, group, local_masks: see AllGather.
        needed: needed[rank][other], the indices of the tokens that `rank` must fetch from rank
            `other` (needed_keys).
    """

    def __init__(
        self, layout: Layout, group: ContextGroup, local_masks: LocalMasks, needed: Needed
    ) -> None:
        device, rank = local_masks.device, group.rank
        self.group, self.dtype = group.group, local_masks.dtype
        self.largest = max(sum(len(places) for places in of_rank) for of_rank in needed)
        # Once: both read it on the host.
        mask = local_masks.mask._replace(queries=local_masks.mask.queries.cpu())
        outward = outward_queries(layout, mask, rank)
        few = len(outward) <= MOST_OUTWARD * layout.held
        outward = outward if few else np.arange(layout.held)  # else all are computed together
        # What the outward queries see of their own rank's keys comes as other ranks' keys do.
        own = own_keys(layout, mask, rank, outward)
        fetched = [own if other == rank else places for other, places in enumerate(needed[rank])]
        given = [
            torch.from_numpy(own if other == rank else needed[other][rank])
            for other in range(group.size)
        ]
        self.gives, self.gets = (
            [len(places) for places in of_ranks] for of_ranks in (given, fetched)
        )
        self.given = torch.cat(given).to(device)
        # What is sent of this rank's tokens, each once, and where among what comes
        # back its gradients are.
        wanted, which = torch.cat(given).unique(return_inverse=True)
        self.wanted, self.parts = wanted[None].to(device), _parts_of(which, len(wanted)).to(device)
        tokens = [
            layout.tokens[:, other, torch.from_numpy(places)]
            for other, places in enumerate(fetched)
        ]
        keys = torch.cat(tokens, 1).to(device)
        order = ascending(keys)
        self.places = inverse(order, keys.shape[1])
        rows = torch.from_numpy(outward)[None].to(device)
        self.rows = rows if few else None
        mine = layout.tokens[:, rank].to(device)
        self.inward = local_masks.part(mine.index_fill(1, rows[0], -1), mine) if few else ()
        self.outward = (
            local_masks.part(mine[:, rows[0]], keys.gather(1, order)) if len(outward) else ()
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        arriving = self._arriving(q, k, v)
        if self.rows is None:
            return scores.with_sinks(*self._outputs(q, arriving, self.outward, scores))
        out, lse = local_attention.forward(q, k, v, self.inward, scores)
        some, lses = self._outputs(take(q, self.rows), arriving, self.outward, scores)
        put(out, self.rows, some)
        return scores.with_sinks(out, lse.index_copy_(2, self.rows[0], lses))

    def backward(self, saved: Saved, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        _, q, k, v, *_ = saved
        scores.add_sink_gradients(saved)
        arriving = self._arriving(q, k, v)
        if self.rows is None:
            dk, dv = torch.zeros_like(k), torch.zeros_like(v)
            dq, sums = self._gradients(saved, arriving, self.outward, scores)
        else:
            dq, dk, dv = local_attention.backward(saved, self.inward, scores)
            outward = saved.of_queries(self.rows)
            some, sums = self._gradients(outward, arriving, self.outward, scores)
            put(dq, self.rows, some)
        for piece, transfer in zip(self._pieces(q, k), sums, strict=True):
            self._add((dk[:, :, piece.keys], dv[:, :, piece.keys]), transfer.result())
        return dq, dk, dv

    def _pieces(self, q: Tensor, k: Tensor) -> list[Piece]:
        coming = self.largest * 2 * k[:, 0].nbytes  # keys and values, to the rank that gets most
        return pieces_of(q.shape[2], k.shape[2], min(MAX_PIECES, 1 + coming // PIECE_BYTES))

    def _gather(self, k: Tensor, v: Tensor, piece: Piece) -> Transfer:
        """Start fetching a piece's heads of the keys and values that the outward queries see; the
        result is (keys, values), each (B, p, heads, D)."""
        own = k[:, :, piece.keys], v[:, :, piece.keys]
        sent = k.new_empty((len(self.given), len(k), 2, *own[0].shape[2:]))
        for index, x in enumerate(own):
            take_into(sent[:, :, index], x.movedim(1, 0), self.given)
        return self._exchange(sent, self.gives, self.gets, self._in_order)

    def _in_order(self, received: Tensor) -> Sequence[Tensor]:
        """Return (keys, values), each (B, m, heads, D) with ascending tokens, from what was
        received, (m, B, 2, heads, D)."""
        found = []
        for x in received.movedim(0, 1).unbind(2):
            found.append(x.new_empty(x.shape))
            put(found[-1], self.places, x)
        return found

    def _reduce(self, keys: Tensor, values: Tensor) -> Transfer:
        """Start sending the gradients (B, p, heads, D) of fetched keys and values to the ranks
        that hold these tokens."""
        batch, count, *heads = keys.shape
        sent = keys.new_empty((count, batch, 2, *heads), dtype=self.dtype)
        for index, x in enumerate((keys, values)):
            # Without outward queries there is nothing, in float32.
            for row in range(batch if count else 0):
                take_into(sent[:, row, index], x[row], self.places[row % len(self.places)])
        return self._exchange(sent, self.gets, self.gives, spare=1)

    def _add(self, owns: Sequence[Tensor], came: Tensor) -> None:
        """Add the received gradients `came`, (w + 1, B, 2, heads, D) in the ranks' order with a
        spare last row, to `owns`: dk and dv of this rank's tokens, each (B, n, heads, D)."""
        came[-1].zero_()  # for tokens that fewer ranks fetched
        total = torch.stack([take(own, self.wanted).movedim(1, 0) for own in owns], 2).to(
            summing_dtype(came.dtype)
        )
        # gathered, since adding at indices takes four times as long on a GPU.
        for part in self.parts:
            total += came.index_select(0, part)
        for own, summed in zip(owns, total.to(came.dtype).movedim(0, 1).unbind(2), strict=True):
            put(own, self.wanted, summed)

    def _exchange(
        self,
        sent: Tensor,
        gives: list[int],
        gets: list[int],
        finish: Callable[[Tensor], object] | None = None,
        spare: int = 0,
    ) -> Transfer:
        """Start an exchange with every rank: gives[r] rows of `sent`, in order, go to rank r, and
        gets[r] rows come from it. The result has the received rows in the ranks' order, then
        `spare` unset rows, and passes through `finish`."""
        received = sent.new_empty((sum(gets) + spare, *sent.shape[1:]))
        work = dist.all_to_all_single(
            received[: sum(gets)], sent, gets, gives, group=self.group, async_op=True
        )
        return Transfer(received, sent, [work], finish)


def _parts_of(which: Tensor, count: int) -> Tensor:
    """Return (c, count): column i has the indices at which `which` equals i, ascending, and below
    them len(which) as a filling; c is how often the most frequent number occurs."""
    order = which.argsort(stable=True)
    numbers = which.bincount(minlength=count)
    nth = torch.arange(len(which)) - (numbers.cumsum(0) - numbers)[which[order]]
    places = torch.full((int(numbers.max()) if len(which) else 0, count), len(which))
    places[nth, which[order]] = order
    return places


def _whole(pieces: Sequence[Tensor]) -> Tensor:
    """Join pieces of heads to one tensor (B, tokens, heads, D); a single piece is returned as it
    is, without a copy."""
    return torch.cat(list(pieces), 2) if len(pieces) > 1 else pieces[0]
