"""Ring attention: keys and values go from rank to rank while each computes on what it has.

LightSeq / DistFlashAttn (Li et al. 2023, arXiv 2310.03294) and Ring Attention (Liu et al. 2023, arXiv 2310.01889). The
partial results are merged through their log-sum-exp in float32; in the backward the gradients of keys and values
travel along with them and come home after the last step.

B batch, m tokens that a rank of the ring holds, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashtrain.distributed.context import call
from flashtrain.distributed.context.bands import Part
from flashtrain.distributed.context.call import Scores, summing_dtype
from flashtrain.distributed.context.transfers import Transfer
from flashtrain_kernels import merge_attention

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
            return call.forward(q, k, v, self.parts[0], scores, first_head)
        held = torch.stack((k, v))
        merged: tuple[Tensor, Tensor] | None = None
        for step in range(self.size):
            coming = self._send_on(held, _KEYS) if step + 1 < self.size else None
            out, lse = call.forward(q, held[0], held[1], self._part(step), scores, first_head)
            if merged is None:
                merged = out.to(summing_dtype(out.dtype)), lse
            else:
                merged = merge_attention([merged, (out, lse)])
            if coming is not None:
                held = coming.arrived()
        if merged is None:
            raise RuntimeError("a ring of no ranks")
        return merged[0].to(q.dtype), merged[1]

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
        if self.size == 1:
            return call.backward(dout, q, k, v, out, lse, self.parts[0], scores, first_head)
        dtype = summing_dtype(q.dtype)
        held = torch.stack((k, v))
        dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
        travelling: Transfer | None = None
        for step in range(self.size):
            coming = self._send_on(held, _KEYS) if step + 1 < self.size else None
            part, *own = call.backward(dout, q, held[0], held[1], out, lse, self._part(step), scores, first_head)
            dq += part
            gradients = torch.stack(own).to(dtype)
            if travelling is not None:  # what the ranks before added for the same keys
                gradients += travelling.arrived()
            travelling = self._send_on(gradients, _GRADIENTS)
            if coming is not None:
                held = coming.arrived()
        if travelling is None:
            raise RuntimeError("a ring of no ranks")
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
