"""The ring: keys and values go from rank to rank, and partial results are merged.

Shapes: B batch, m tokens of one rank of the ring (in hybrid: of its whole group that divides the heads), H query heads,
K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashtrain.distributed.context import local_attention
from flashtrain.distributed.context.local_attention import Gradients, Scores, summing_dtype
from flashtrain.distributed.context.local_mask import Part
from flashtrain.distributed.context.transfers import Piece, Transfer, pieces_of
from flashtrain_kernels import merge_attention_into

_KEYS, _GRADIENTS = 1, 3  # first tags, of two each: both streams are under way between the same two ranks at once


class Ring:
    """Ring attention: keys and values go from rank to rank while every rank computes with those that it has.

    Ring attention is that of LightSeq / DistFlashAttn (Li et al. 2023, arXiv 2310.03294) and Liu et al. (2023, arXiv
    2310.01889). Partial results are merged by their log-sum-exp in float32. In the backward the gradients of other
    ranks' keys and values travel with them, in float32, and come home from the last rank that has them. Half of the
    heads' own keys are computed before the first keys arrive, the other half while the last gradients do.

    Args:
        group: the process group; None for one rank.
        parts: parts[j] is what this rank's queries see of the keys that rank j of the ring holds.
    """

    def __init__(self, group: Any, parts: Sequence[Part]) -> None:
        self.group = group
        self.parts = parts
        self.size = len(parts)
        self.rank = dist.get_rank(group) if self.size > 1 else 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Return (out (B, m, H, D), log-sum-exp (B, H, m)) of this rank's queries over all keys of the ring.

        q is (B, m, H, D), k and v are (B, m, K, D); scores: scale, dropout and other options.
        """
        coming = self._send_on([k.contiguous(), v.contiguous()], _KEYS) if self.size > 1 else None
        out, lse = local_attention.forward(q, k, v, self.parts[self.rank], scores)
        merged = out if coming is None else out.to(summing_dtype(out.dtype))
        del out  # before the next part's is made
        for step in range(1, self.size):
            assert coming is not None
            keys, values = coming.result()
            coming = self._send_on([keys, values], _KEYS) if step + 1 < self.size else None
            for own, some, rows in local_attention.forward_calls(q, keys, values, self._part(step), scores):
                merge_attention_into(merged[:, own], lse[:, :, own], some, rows)
        out, lse = scores.with_sinks(merged, lse)
        return out.to(q.dtype), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of this rank's tokens; out and lse are those of `forward`. Sums are in float32."""
        scores.add_sink_gradients(dout, out, lse)
        if self.size == 1:
            return local_attention.backward(dout, q, k, v, out, lse, self.parts[0], scores)

        def of_own_keys(piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
            rows, keys = piece.queries, piece.keys
            of_heads = dout[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows], lse[:, rows]
            own_scores = scores.from_head(scores.first_head + rows.start)
            return local_attention.backward(*of_heads, self.parts[self.rank], own_scores)

        coming: Transfer | None = self._send_on([k.contiguous(), v.contiguous()], _KEYS)
        first, *rest = pieces_of(q.shape[2], k.shape[2], limit=2)
        own = [of_own_keys(first)]
        dtype = summing_dtype(q.dtype)
        dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
        travelling: Transfer | None = None
        for step in range(1, self.size):
            assert coming is not None
            keys, values = coming.result()
            coming = self._send_on([keys, values], _KEYS) if step + 1 < self.size else None
            found = list(local_attention.backward_calls(dout, q, keys, values, out, lse, self._part(step), scores))
            # What the ranks before added for the same keys, to which this one's gradients are added where they lie.
            none = (torch.zeros_like(x, dtype=dtype) for x in (keys, values))
            dk, dv = none if travelling is None else travelling.result()
            _add(found, dq, dk, dv)
            travelling = self._send_on([dk, dv], _GRADIENTS)
            del keys, values, found, dk, dv  # before the next part's are made; what is being sent stays
        own += map(of_own_keys, rest)
        assert travelling is not None
        dk, dv = travelling.result()
        dq, dk, dv = (
            x.add_(torch.cat(parts, 2)).to(q.dtype)
            for x, parts in zip((dq, dk, dv), zip(*own, strict=True), strict=True)
        )
        return dq, dk, dv

    def _part(self, step: int) -> Part:
        """Keys come from the rank before: at step s those of rank r - s are here."""
        return self.parts[(self.rank - step) % self.size]

    def _send_on(self, tensors: list[Tensor], first_tag: int) -> Transfer:
        """Start sending tensors to the next rank and receiving their likes from the one before."""
        received = [torch.empty_like(x) for x in tensors]
        after, before = ((self.rank + hop) % self.size for hop in (1, -1))
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(act, x, group=self.group, tag=first_tag + number, group_peer=peer)
                for act, peer, moved in ((dist.isend, after, tensors), (dist.irecv, before, received))
                for number, x in enumerate(moved)
            ]
        )
        return Transfer(received, tensors, works)


def _add(found: Sequence[Gradients], dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Add the gradients of kernel calls to the sums."""
    for one in found:
        dq[:, one.queries] += one.dq
        dk[:, one.keys] += one.dk
        dv[:, one.keys] += one.dv
