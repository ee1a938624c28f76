"""The float64 reference: attention and its gradients, for one group of heads in one
sequence of the batch.

It is computed for a chunk of queries at a time, so that 64K tokens fit, and shares no code with
flashtrain_kernels' own reference. S sequence (Sq queries, Sk keys), H query heads, K key/value
heads, D head dimension (Dv of values); g = H / K query heads a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashtrain_recipes.attention_benchmark.cases import Case
from flashtrain_recipes.attention_benchmark.inputs import Context, Inputs, query_chunks

Shard = Callable[[Tensor], Tensor]  # cuts a tensor (S, ...) to the tokens that are compared

# Elements of the score matrix made at once: 256 MiB in float64 on a GPU, 32 MiB on a
# CPU; five such matrices.
_CHUNK = {"cuda": 2**25, "cpu": 2**22}


@dataclass(frozen=True)
class Expected:
    """The float64 results for the batch's last sequence and the query heads of
    its last key/value head."""

    out: Tensor  # (Sq, g, Dv)
    dq: Tensor  # (Sq, g, D)
    dk: Tensor  # (Sk, D)
    dv: Tensor  # (Sk, Dv)

    def error(self, out: Tensor, shard: Shard = lambda x: x) -> float:
        """Return the largest absolute error of out (B, Sq, H, Dv), divided by the reference's
        largest absolute value.

        Args:
            shard: cuts the reference, a tensor (S, ...), to the tokens that `out` has.
        """
        return _relative(out[-1, :, -self.out.shape[1] :], self.out, shard)

    def gradient_error(
        self, dq: Tensor, dk: Tensor, dv: Tensor, *, shard: Shard = lambda x: x
    ) -> float:
        """Return the largest error of the gradients dq, dk, dv of q, k, v; error and
        `shard` as in `error`."""
        pairs = (
            (dq[-1, :, -self.dq.shape[1] :], self.dq),
            (dk[-1, :, -1], self.dk),
            (dv[-1, :, -1], self.dv),
        )
        return max(_relative(found, wanted, shard) for found, wanted in pairs)


def expected(case: Case, inputs: Inputs, context: Context) -> Expected:
    """Compute the reference for one set of inputs, without dropout: each
    implementation draws its own."""
    group = case.heads // case.kv_heads
    first = case.heads - group
    q, dout = (x[-1, :, first:].detach().double() for x in (inputs.q, inputs.dout))
    k, v = (x[-1, :, -1].detach().double().requires_grad_() for x in (inputs.k, inputs.v))
    out, dq, dk, dv = (torch.zeros_like(x) for x in (dout, q, k, v))
    for begin, end in query_chunks(case, _CHUNK.get(q.device.type, _CHUNK["cpu"])):
        for member in range(group):
            head = first + member
            rows = q[begin:end, member].requires_grad_()
            scores = _scores(case, inputs, rows @ k.T * case.scale, head, begin)
            scores = scores.masked_fill(~context.visible(head, begin, end), -torch.inf)
            sink = (
                []
                if inputs.sink is None
                else [inputs.sink[head].detach().double().expand(end - begin, 1)]
            )
            part = torch.softmax(torch.cat([scores, *sink], dim=-1), dim=-1)[:, : case.seqlen_k] @ v
            gradients = torch.autograd.grad(part, (rows, k, v), dout[begin:end, member])
            out[begin:end, member], dq[begin:end, member] = part.detach(), gradients[0]
            dk, dv = dk + gradients[1], dv + gradients[2]
    return Expected(out, dq, dk, dv)


def _scores(case: Case, inputs: Inputs, scores: Tensor, head: int, begin: int) -> Tensor:
    # softcap, ALiBi and bias in the scores of some queries, from number `begin`
    rows, keys = scores.shape
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if inputs.slopes is not None:
        position = torch.arange(begin, begin + rows, device=scores.device) + (keys - case.seqlen_q)
        distance = (position[:, None] - torch.arange(keys, device=scores.device)[None, :]).abs()
        scores = scores - inputs.slopes[head].double() * distance
    if inputs.bias is not None:
        scores = scores + inputs.bias[0, head, begin : begin + rows].detach().double()
    return scores


def _relative(found: Tensor, wanted: Tensor, shard: Shard) -> float:
    largest = float(wanted.abs().max()) or 1.0
    return float((found.double() - shard(wanted)).abs().max()) / largest
