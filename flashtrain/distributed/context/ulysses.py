"""Ulysses: every rank computes all tokens for some of the heads, with the
unchanged kernel and mask.

The exchange of tokens for heads is DeepSpeed-Ulysses' (Jacobs et al. 2023, arXiv 2309.14509).

Shapes: B batch, n tokens a rank holds, U ranks that divide the heads, m tokens these hold together,
H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from flashtrain.distributed.context.group import ContextGroup
from flashtrain.distributed.context.indexing import ascending, copy, inverse, take, take_into
from flashtrain.distributed.context.layout import Layout
from flashtrain.distributed.context.local_attention import Saved, Scores, summing_dtype
from flashtrain.distributed.context.local_mask import LocalMasks
from flashtrain.distributed.context.ring import Ring
from flashtrain.distributed.context.transfers import (
    MAX_PIECES,
    Piece,
    Transfer,
    overlapped,
    pieces_of,
)

# Rows of queries, all heads counted, that a piece has at least: 512 tiles of 128, four for each of
# 132 multiprocessors.
PIECE_ROWS = 1 << 16


def head_pieces(heads: int, kv_heads: int, tokens: int) -> list[Piece]:
    """Divide a rank's own heads into pieces: by key/value heads, or by query heads where the rank
    has a single key/value head.

    Args:
        heads, kv_heads: the rank's own numbers of query and key/value heads.
        tokens: the tokens that it computes, over all rows of the batch.
    """
    limit = max(1, min(MAX_PIECES, heads * tokens // PIECE_ROWS))
    if kv_heads > 1:
        return pieces_of(heads, kv_heads, limit)
    # The one key head comes with the first query heads; the other pieces have no keys of their own.
    count = min(heads, limit)
    ends = [heads * index // count for index in range(count + 1)]
    return [Piece(slice(0, int(first == 0)), slice(first, past)) for first, past in pairwise(ends)]


class Ulysses:
    """Context parallelism by ulysses, ring, or hybrid: groups of ranks divide the heads, and rings
    connect the groups.

    hybrid is USP's (Fang and Zhao 2024, arXiv 2405.07719): 12 heads on 8 ranks as groups of 4,
    rings of 2. With heads_degree R it is ulysses alone, with heads_degree 1 the ring alone.

    Args:
        layout: which rank holds which tokens.
        group: the ranks that share the sequence.
        local_masks: makes this rank's part of the mask of the whole sequence.
        heads_degree: the number U of neighbouring ranks that divide the heads.
    """

    def __init__(
        self, layout: Layout, group: ContextGroup, local_masks: LocalMasks, heads_degree: int
    ) -> None:
        self.degree = heads_degree
        self.group, ring_group = group.parts(heads_degree)
        device = local_masks.device
        mine = group.rank // heads_degree
        if heads_degree == group.size:
            # All tokens come together: in the sequence's own order, without padding,
            # under the mask itself.
            order = ascending(layout.tokens.flatten(1).to(device))[:, : layout.seqlen]
            self.ring = Ring(None, [local_masks.part(None, None)])
        else:
            # (Bl, U * n) a ring index.
            tokens = [ranks.flatten(1) for ranks in layout.tokens.split(heads_degree, 1)]
            order = ascending(tokens[mine].to(device))
            held = torch.stack([each.gather(1, ascending(each)) for each in tokens], 1)
            self.ring = Ring.under(
                local_masks, Layout(held, layout.seqlen, layout.block), ring_group
            )
        # For each token (B, m) its index among those that arrive, (U, B, n), and
        # the other way round.
        rows = torch.arange(local_masks.batch, device=device)[:, None]
        arrived = (order // layout.held * len(rows) + rows) * layout.held + order % layout.held
        places = (
            inverse(order, heads_degree * layout.held)
            .unflatten(1, (heads_degree, -1))
            .movedim(1, 0)
        )
        self.order = arrived.flatten()
        self.back = (places.clamp(min=0) + rows * order.shape[1]).flatten()
        self.padding: Tensor | None = None
        if layout.padding:
            self.padding = (places < 0).expand(-1, len(rows), -1).flatten().nonzero()[:, 0]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Return (out (B, n, H, D) of this rank's tokens, log-sum-exp (B, H / U, m) of the
        heads that it computes).

        q (B, n, H, D), k and v (B, n, K, D) are of this rank's tokens; scores: scale,
        dropout and other options.
        """
        if self.degree == 1:
            return self.ring.forward(q, k, v, scores)
        k, v = self._repeated(k, v)
        leaving: list[Transfer] = []
        lses, keys = [], (k, v)
        for piece, (own_q, *came) in overlapped(
            self._pieces(q, k), lambda piece: self._to_heads(piece, q, k, v)
        ):
            own_k, own_v = keys = came if came[0].shape[2] else keys
            of_heads = scores.from_head(self._first_head(q) + piece.queries.start)
            out, lse = self.ring.forward(own_q, own_k, own_v, of_heads)
            self._leave(leaving, out)
            lses.append(lse)
        return self._of_tokens(leaving)[0], torch.cat(lses, 1)

    def backward(self, saved: Saved, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of this rank's tokens; saved: from `forward`."""
        if self.degree == 1:
            return self.ring.backward(saved, scores)
        dout, q, k, v, out, lse = saved
        kv_heads = k.shape[2]
        k, v = self._repeated(k, v)
        leaving: list[Transfer] = []
        pieces, keys = self._pieces(q, k), (k, v)
        shared = not pieces[-1].keys.stop
        sums: list[Tensor] = []  # of the gradients of a key head that all pieces read
        # Exchanged anew instead of being saved: it costs a fraction of the computing, and no
        # memory between the passes.
        for piece, own in overlapped(
            pieces, lambda piece: self._to_heads(piece, q, k, v, out, dout)
        ):
            own_q, *came, own_out, own_dout = own
            own_k, own_v = keys = came if came[0].shape[2] else keys
            of_heads = scores.from_head(self._first_head(q) + piece.queries.start)
            rows = lse[:, piece.queries].contiguous()
            here = Saved(own_dout, own_q, own_k, own_v, own_out, rows)
            dq, *to_keys = self.ring.backward(here, of_heads)
            if shared:
                sums = sums or [torch.zeros_like(x, dtype=summing_dtype(x.dtype)) for x in to_keys]
                sums = [total.add_(x) for total, x in zip(sums, to_keys, strict=True)]
                to_keys = [(x if piece is pieces[-1] else x[:, :, :0]).to(k.dtype) for x in sums]
            self._leave(leaving, dq, *to_keys)
        dq, dk, dv = self._of_tokens(leaving)
        return dq, _summed(dk, kv_heads), _summed(dv, kv_heads)

    def _pieces(self, q: Tensor, k: Tensor) -> list[Piece]:
        """Divide a rank's own heads into pieces; in hybrid into a single one, since its ring
        communicates while it computes."""
        heads, kv_heads = q.shape[2] // self.degree, k.shape[2] // self.degree
        if self.ring.size > 1:
            return [Piece(slice(0, kv_heads), slice(0, heads))]
        return head_pieces(heads, kv_heads, self.degree * q.shape[:2].numel())

    def _first_head(self, q: Tensor) -> int:
        return dist.get_rank(self.group) * (q.shape[2] // self.degree)

    def _repeated(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return keys and values with each head repeated until U divides the number of heads, so
        that every rank gets the key/value heads of its query heads."""
        heads = tensors[0].shape[2]
        copies = math.lcm(heads, self.degree) // heads
        return tuple(x if copies == 1 else x.repeat_interleave(copies, 2) for x in tensors)

    def _to_heads(self, piece: Piece, q: Tensor, k: Tensor, v: Tensor, *like_q: Tensor) -> Transfer:
        """Start exchanging this rank's tokens of all heads, (B, n, heads, D), for all m tokens of
        the heads of a piece. like_q: further tensors with q's shape."""
        chosen = [
            (q, piece.queries),
            (k, piece.keys),
            (v, piece.keys),
            *((x, piece.queries) for x in like_q),
        ]
        counts = [heads.stop - heads.start for _, heads in chosen]
        sent = q.new_empty((self.degree, *q.shape[:2], sum(counts), q.shape[3]))
        for target, (x, heads) in zip(sent.split(counts, 3), chosen, strict=True):
            copy(target, x.unflatten(2, (self.degree, -1))[:, :, :, heads].movedim(2, 0))
        return self._exchange(sent, partial(self._of_heads, counts))

    def _of_heads(self, counts: list[int], received: Tensor) -> Sequence[Tensor]:
        """Return the tensors (B, m, counts[i] heads, D), tokens ascending, from what was received,
        (U, B, n, sum(counts) heads, D)."""
        joined = take(received.flatten(0, 2)[None], self.order[None])
        return joined.view(received.shape[1], -1, *received.shape[3:]).split(counts, 2)

    def _leave(self, leaving: list[Transfer], *tensors: Tensor) -> None:
        """Start sending tensors (B, m, heads of a piece, D) back to the ranks that hold their
        tokens, and append the transfer to `leaving`, once the one before is over."""
        if leaving:
            # It left while this piece was computed: what was sent is no longer needed.
            leaving[-1].wait()
        counts = [x.shape[2] for x in tensors]
        sent = tensors[0].new_empty((len(self.back), sum(counts), tensors[0].shape[3]))
        for target, x in zip(sent.split(counts, 1), tensors, strict=True):
            take_into(target, x.flatten(0, 1), self.back)
        if self.padding is not None:
            sent.index_fill_(0, self.padding, 0)
        parts = sent.view(self.degree, tensors[0].shape[0], -1, *sent.shape[1:])
        leaving.append(self._exchange(parts, lambda received: received.split(counts, 3)))

    def _of_tokens(self, transfers: list[Transfer]) -> list[Tensor]:
        """Return the tensors (B, n, heads, D) of this rank's tokens, joined from the transfers of
        all pieces."""
        return [
            _joined(parts)
            for parts in zip(*(transfer.result() for transfer in transfers), strict=True)
        ]

    def _exchange(self, sent: Tensor, finish: Callable[[Tensor], object]) -> Transfer:
        """Start an exchange of sent (U, ...): sent[u] goes to rank u, received[u] comes from rank
        u. finish: makes the transfer's result from `received`."""
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        return Transfer(received, sent, [work], finish)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Join `parts`, one for each piece of the heads, (U, B, n, heads of the piece, D) from the U
    ranks, to a tensor of all heads, (B, n, heads, D)."""
    counts = [part.shape[3] for part in parts]
    degree, batch, held, _, width = parts[0].shape
    whole = parts[0].new_empty((batch, held, degree, sum(counts), width))
    for target, part in zip(whole.split(counts, 3), parts, strict=True):
        copy(target, part.movedim(0, 2))
    return whole.flatten(2, 3)


def _summed(gradient: Tensor, heads: int) -> Tensor:
    """Return the gradient of heads, (B, n, heads, D), from that of their copies (_repeated),
    (B, n, copies * heads, D)."""
    if gradient.shape[2] == heads:
        return gradient
    return (
        gradient.unflatten(2, (heads, -1))
        .sum(3, dtype=summing_dtype(gradient.dtype))
        .to(gradient.dtype)
    )
