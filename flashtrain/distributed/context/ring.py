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
from flashtrain.distributed.context.local_attention import Scores, summing_dtype
from flashtrain.distributed.context.local_mask import Part
from flashtrain.distributed.context.transfers import Transfer
from flashtrain_kernels import merge_attention_into

_KEYS, _GRADIENTS = 1, 2  # tags: both streams are under way between the same two ranks at once


class Ring:
    """Ring attention: keys and values go from rank to rank while every rank computes with those that it has.

    Ring attention is that of LightSeq / DistFlashAttn (Li et al. 2023, arXiv 2310.03294) and Liu et al. (2023, arXiv
    2310.01889). Partial results are merged by their log-sum-exp in float32. In the backward the gradients of keys and
    values travel with them, and are back at their rank after the last step.

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
        if self.size == 1:
            out, lse = local_attention.forward(q, k, v, self.parts[0], scores)
            return scores.with_sinks(out, lse)
        held = torch.stack((k, v))
        merged: tuple[Tensor, Tensor] | None = None
        for step in range(self.size):
            coming = self._send_on(held, _KEYS) if step + 1 < self.size else None
            out, lse = local_attention.forward(q, held[0], held[1], self._part(step), scores)
            if merged is None:
                merged = out.to(summing_dtype(out.dtype)), lse
            else:
                merge_attention_into(*merged, out, lse)
            del out  # before the next part's is made
            if coming is not None:
                held = coming.result()
        assert merged is not None
        out, lse = scores.with_sinks(*merged)
        return out.to(q.dtype), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of this rank's tokens; out and lse are those of `forward`. Sums are in float32."""
        scores.add_sink_gradients(dout, out, lse)
        if self.size == 1:
            return local_attention.backward(dout, q, k, v, out, lse, self.parts[0], scores)
        dtype = summing_dtype(q.dtype)
        held = torch.stack((k, v))
        dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
        travelling: Transfer | None = None
        for step in range(self.size):
            coming = self._send_on(held, _KEYS) if step + 1 < self.size else None
            part, *own = local_attention.backward(dout, q, held[0], held[1], out, lse, self._part(step), scores)
            dq += part
            # What the ranks before added for the same keys, to which this one's gradients are added where they lie.
            gradients = torch.zeros_like(held, dtype=dtype) if travelling is None else travelling.result()
            gradients[0] += own[0]
            gradients[1] += own[1]
            travelling = self._send_on(gradients, _GRADIENTS)
            del part, own, gradients  # before the next part's are made; what is being sent stays
            if coming is not None:
                held = coming.result()
        assert travelling is not None
        dk, dv = travelling.result().to(k.dtype)
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
