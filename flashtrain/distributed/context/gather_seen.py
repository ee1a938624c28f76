"""All-gather of the keys and values that are seen: of other ranks' tokens only those that a rank's queries look at.

For packed documents, which a layout keeps together where it can: most keys are seen by the rank that holds them alone.
As MagiAttention's group-cast and group-reduce (SandAI 2025, https://github.com/SandAI-org/MagiAttention), by one
exchange of unequal parts; some heads at a time, the next coming while these are computed. The gradients of keys and
values go back the same way and are added up in float32 at least, rank after rank.

B batch, n tokens a rank holds, p keys it has after the exchange, m tokens it gets and w it gives, R ranks, H query
heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flashtrain.distributed.context.bands import local_part
from flashtrain.distributed.context.call import summing_dtype
from flashtrain.distributed.context.gather import Coming, GatherKeys
from flashtrain.distributed.context.group import ContextGroup
from flashtrain.distributed.context.layout import Layout, ascending, inverse, take
from flashtrain.distributed.context.transfers import Piece, Transfer
from flashtrain_kernels import Mask

Needed = Sequence[Sequence[np.ndarray]]


class GatherSeen(GatherKeys):
    """Keys and values of other ranks' tokens that this rank's queries see.

    mask: of the whole sequence; plan: makes a part of it ready for the kernels. needed: of traffic.needed_places.
    """

    def __init__(self, layout: Layout, group: ContextGroup, mask: Mask, plan: Any, needed: Needed) -> None:
        device, rank = mask.queries.device, group.rank
        self.group = group.group
        self.given = [torch.from_numpy(needed[other][rank]).to(device) for other in range(group.size)]
        self.gives = [len(places) for places in self.given]
        self.gets = [len(places) for places in needed[rank]]
        self.sent = torch.cat(self.given)
        own = layout.tokens[:, rank]
        others = [layout.tokens[:, other, torch.from_numpy(places)] for other, places in enumerate(needed[rank])]
        keys = torch.cat([own, *others], 1)
        order = ascending(keys)
        self.held = layout.held
        self.order, self.back = order.to(device), inverse(order, keys.shape[1]).to(device)
        self.part = plan(local_part(mask, own.to(device), keys.gather(1, order).to(device)))

    def _gather(self, k: Tensor, v: Tensor, piece: Piece) -> Coming:
        """Start fetching some heads of the keys and values that other ranks hold, (m, B, 2, heads, D); they become all
        that there are then, (B, p, ...)."""
        held = torch.stack((k[:, :, piece.keys], v[:, :, piece.keys]), 2)
        others = self._exchange(held.index_select(1, self.sent).movedim(1, 0), self.gives, self.gets)
        return Coming(others, lambda: take(torch.cat((held, others.arrived().movedim(0, 1)), 1), self.order))

    def _reduce(self, gradients: Tensor) -> Coming:
        """Start the way of gradients (B, p, ...) to the ranks that hold their tokens: what comes is (w, B, ...)."""
        found = take(gradients, self.back).to(summing_dtype(gradients.dtype))
        coming = self._exchange(found[:, self.held :].movedim(1, 0), self.gets, self.gives)
        return Coming(coming, partial(self._summed, found[:, : self.held].contiguous(), coming))

    def _summed(self, own: Tensor, coming: Transfer) -> Tensor:
        """Own gradients and what came from each rank, in turn (a rank brings a token once): the same in every run."""
        for places, part in zip(self.given, coming.arrived().split(self.gives), strict=True):
            if len(places):
                own.index_add_(1, places, part.movedim(0, 1))
        return own

    def _exchange(self, x: Tensor, gives: list[int], gets: list[int]) -> Transfer:
        """Start sending the first gives[0] of x to rank 0 and so on; what comes is in the ranks' order."""
        sent = x.contiguous()
        received = sent.new_empty((sum(gets), *sent.shape[1:]))
        work = dist.all_to_all_single(received, sent, gets, gives, group=self.group, async_op=True)
        return Transfer(received, sent, [work])
