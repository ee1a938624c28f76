"""The ring: keys and values go from rank to rank, and partial results are merged.

Shapes: B batch, m tokens of one rank of the ring (in hybrid: of its whole group that divides the
heads), H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flashtrain.distributed.context import local_attention
from flashtrain.distributed.context.indexing import put, take
from flashtrain.distributed.context.layout import Layout
from flashtrain.distributed.context.layouts import PLAIN
from flashtrain.distributed.context.local_attention import Saved, Scores, summing_dtype
from flashtrain.distributed.context.local_mask import LocalMasks, Part
from flashtrain.distributed.context.needed_keys import MAX_FETCHED, needed_keys, outward_queries
from flashtrain.distributed.context.transfers import Transfer
from flashtrain_kernels import merge_attention_into

# first tags, of two each: both streams are under way between the same two ranks at once.
_KEYS, _GRADIENTS = 1, 3


class Ring:
    """Ring attention: keys and values go from rank to rank while every rank computes
    with those that it has.

    Ring attention is that of LightSeq / DistFlashAttn (Li et al. 2023, arXiv 2310.03294) and Liu et
    al. (2023, arXiv 2310.01889). Partial results are merged by their log-sum-exp in float32. In the
    backward the gradients of keys and values travel with them, in float32, and the last rank that
    has them returns them to their own. A rank's attention to its own keys is computed for half of
    the heads before the first keys arrive, for the other half while the last gradients do.

    Args:
        group: the process group; None for one rank.
        parts: parts[j] is what this rank's queries see of the keys that rank j of the ring holds.
        moving: moving[j] are the indices (1, p) of the tokens of rank j whose keys and values
            travel: the only keys in parts[j] on other ranks. None: all tokens.
        rows: the indices (1, r) of this rank's queries that see keys of other ranks: the only
            queries in parts[j] for the other ranks j. None: all queries.
    """

    def __init__(
        self,
        group: Any,
        parts: Sequence[Part],
        moving: Sequence[Tensor] | None = None,
        rows: Tensor | None = None,
    ) -> None:
        self.group = group
        self.parts, self.moving, self.rows = parts, moving, rows
        self.size = len(parts)
        self.rank = dist.get_rank(group) if self.size > 1 else 0
        # Of the keys of all ranks that the busiest one passes on, those that travel.
        self.share = 1.0

    @classmethod
    def under(cls, local_masks: LocalMasks, layout: Layout, group: Any) -> Ring:
        """Make the ring under a mask: if other ranks see few of the keys, only those travel, else
        all. layout: which rank of the ring holds which tokens."""
        mask, device, rank = local_masks.mask, local_masks.device, dist.get_rank(group)
        held = layout.tokens.to(device).unbind(1)
        # Under plain masks nearly all keys are seen.
        needed = () if mask.band in PLAIN else needed_keys(layout, mask)
        seen = [np.unique(np.concatenate(of_ranks)) for of_ranks in zip(*needed, strict=True)]
        if max(map(len, seen), default=layout.held) > MAX_FETCHED * layout.held:
            return cls(group, [local_masks.part(held[rank], keys) for keys in held])
        moving = [torch.from_numpy(places)[None].to(device) for places in seen]
        rows = torch.from_numpy(outward_queries(layout, mask, rank))[None].to(device)
        parts = [
            local_masks.part(held[rank][:, rows[0]], keys[:, places[0]]) if len(own) else ()
            for keys, places, own in zip(held, moving, needed[rank], strict=True)
        ]
        parts[rank] = local_masks.part(held[rank], held[rank])
        ring, counts = cls(group, parts, moving, rows), [len(places) for places in seen]
        # Those of all ranks but one.
        ring.share = (sum(counts) - min(counts)) / ((ring.size - 1) * layout.held)
        return ring

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Return (out (B, m, H, D), log-sum-exp (B, H, m)) of this rank's queries
        over all keys of the ring.

        q is (B, m, H, D), k and v are (B, m, K, D); scores: scale, dropout and other options.
        """
        if self.size == 1:
            return scores.with_sinks(*local_attention.forward(q, k, v, self.parts[0], scores))
        coming: Transfer | None = self._send_keys(k, v)
        out, lse = local_attention.forward(q, k, v, self.parts[self.rank], scores)
        q, merged = _taken(q, self.rows), _taken(out, self.rows).to(summing_dtype(out.dtype))
        total = lse if self.rows is None else lse.index_select(2, self.rows[0])
        if self.rows is None:
            out = merged  # before the next part's is made
        for step in range(1, self.size):
            assert coming is not None
            keys, values = coming.result()
            coming = self._send_on([keys, values], step, _KEYS) if step + 1 < self.size else None
            for own, more, rows in local_attention.forward_calls(
                q, keys, values, self._part(step), scores
            ):
                merge_attention_into(merged[:, own], total[:, :, own], more, rows)
        if self.rows is not None:
            put(out, self.rows, merged.to(out.dtype))
            lse.index_copy_(2, self.rows[0], total)
        out, lse = scores.with_sinks(out, lse)
        return out.to(k.dtype), lse

    def backward(self, saved: Saved, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of this rank's tokens, summed in float32; saved: from `forward`."""
        _, q, k, v, *_ = saved
        scores.add_sink_gradients(saved)
        if self.size == 1:
            return local_attention.backward(saved, self.parts[0], scores)
        kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]

        def of_own_keys(first: int, past: int) -> tuple[Tensor, Tensor, Tensor]:
            rows, keys = slice(first * group, past * group), slice(first, past)
            own_scores = scores.from_head(scores.first_head + rows.start)
            of_heads = saved.of_heads(rows, keys)
            return local_attention.backward(of_heads, self.parts[self.rank], own_scores)

        coming: Transfer | None = self._send_keys(k, v)
        half = (kv_heads + 1) // 2
        own = [of_own_keys(0, half)]
        some, dtype = saved.of_queries(self.rows), summing_dtype(q.dtype)
        dq = torch.zeros(some.q.shape, dtype=dtype, device=q.device)
        travelling: Transfer | None = None
        for step in range(1, self.size):
            assert coming is not None
            keys, values = coming.result()
            coming = self._send_on([keys, values], step, _KEYS) if step + 1 < self.size else None
            here = some._replace(k=keys, v=values)
            found = list(local_attention.backward_calls(here, self._part(step), scores))
            # What the ranks before added for the same keys, to which this one's gradients are
            # added where they lie.
            none = (torch.zeros_like(x, dtype=dtype) for x in (keys, values))
            dk, dv = none if travelling is None else travelling.result()
            _add(found, dq, dk, dv)
            travelling = self._send_on([dk, dv], step, _GRADIENTS)
            # Before the next part's are made; what is being sent stays.
            del keys, values, here, found, dk, dv
        if half < kv_heads:
            own.append(of_own_keys(half, kv_heads))
        assert travelling is not None
        dk, dv = travelling.result()
        moved = None if self.moving is None else self.moving[self.rank]
        to_q, to_k, to_v = zip(*own, strict=True)
        return (
            _sum(to_q, dq, self.rows),
            _sum(to_k, dk, moved).to(k.dtype),
            _sum(to_v, dv, moved).to(v.dtype),
        )

    def _part(self, step: int) -> Part:
        """What this rank's queries see of the keys that are here at a step: of rank r - step,
        as keys travel onward."""
        return self.parts[(self.rank - step) % self.size]

    def _send_keys(self, k: Tensor, v: Tensor) -> Transfer:
        """Start sending this rank's keys and values, as far as they travel, to the next rank, and
        receiving those of the rank before."""
        moved = None if self.moving is None else self.moving[self.rank]
        return self._send_on([_taken(x, moved).contiguous() for x in (k, v)], 0, _KEYS)

    def _send_on(self, tensors: list[Tensor], step: int, first_tag: int) -> Transfer:
        """Start sending tensors to the next rank; the result is such tensors from the rank before.
        At step s rank r sends what belongs to the tokens of rank r - s."""
        after, before = ((self.rank + hop) % self.size for hop in (1, -1))
        count = tensors[0].shape[1] if self.moving is None else self.moving[before - step].shape[1]
        received = [x.new_empty((x.shape[0], count, *x.shape[2:])) for x in tensors]
        operations = [
            dist.P2POp(act, x, group=self.group, tag=first_tag + number, group_peer=peer)
            for act, peer, moved in ((dist.isend, after, tensors), (dist.irecv, before, received))
            for number, x in enumerate(moved)
            if x.numel()
        ]
        return Transfer(received, tensors, dist.batch_isend_irecv(operations) if operations else [])


def _taken(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else take(x, index)


def _add(
    found: list[tuple[slice, slice, Tensor, Tensor, Tensor]], dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Add what kernel calls found, (queries, keys, dq, dk, dv) each, to the sums dq, dk, dv."""
    for queries, keys, *parts in found:
        for x, where, part in zip((dq, dk, dv), (queries, keys, keys), parts, strict=True):
            x[:, where].add_(part)


def _sum(parts: tuple[Tensor, ...], more: Tensor, index: Tensor | None) -> Tensor:
    """Return `parts`, each of some heads, joined along the heads, plus `more`: further gradients
    of the tokens at `index` (None: of all tokens)."""
    own = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    if index is None:
        return more.add_(own).to(own.dtype)
    put(own, index, take(own, index).add(more).to(own.dtype))
    return own
