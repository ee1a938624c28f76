"""What the answer is: attention and its gradients in float64, by hand, for a few heads of one row of the batch.

Written apart from flashtrain_kernels' own reference, piece by piece of the queries, so that 64K tokens fit as well.
S sequence (Sq queries, Sk keys), H query heads, K key/value heads, D head dimension; g = H / K query heads a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashtrain_recipes.attention_benchmark.cases import Case
from flashtrain_recipes.attention_benchmark.inputs import Context, Inputs, pieces, visible

# Elements of the score matrix held at once, in float64: 512 MiB on a GPU, 32 MiB on a CPU.
_PIECE = {"cuda": 2**26, "cpu": 2**22}


@dataclass(frozen=True)
class Expected:
    """out, dq (Sq, g, D), dk, dv (Sk, D), float64: of the last row of the batch and its last key/value head's group."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def error(self, out: Tensor) -> float:
        """The largest difference of out (B, Sq, H, D) from the reference, over the reference's largest value."""
        return _relative(out[-1, :, -self.out.shape[1] :], self.out)

    def gradient_error(self, dq: Tensor, dk: Tensor, dv: Tensor) -> float:
        """The same for the three gradients, in q's and k's shapes: the largest of the three."""
        pairs = ((dq[-1, :, -self.dq.shape[1] :], self.dq), (dk[-1, :, -1], self.dk), (dv[-1, :, -1], self.dv))
        return max(_relative(found, wanted) for found, wanted in pairs)


@torch.no_grad()
def expected(case: Case, inputs: Inputs, context: Context) -> Expected:
    """The reference for one set of inputs. Dropout is not part of it: every implementation draws its own."""
    group = case.heads // case.kv_heads
    first = case.heads - group
    q = inputs.q[-1, :, first:].double()
    dout = inputs.dout[-1, :, first:].double()
    k, v = inputs.k[-1, :, -1].double(), inputs.v[-1, :, -1].double()
    out, dq = torch.empty_like(q), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    index = torch.arange(case.seqlen_q, device=q.device)
    limit = _PIECE.get(q.device.type, _PIECE["cpu"])
    for begin, end in pieces(case, limit):
        for member in range(group):
            seen = visible(case, index[begin:end], first + member, context.shared)
            q_part, dout_part = q[begin:end, member], dout[begin:end, member]
            scores, slope = _scores(case, inputs, q_part, k, first + member, begin)
            scores = scores.masked_fill_(~seen, -torch.inf)
            # A row that sees nothing has no maximum: its weights are 0, not NaN.
            sink = [] if inputs.sink is None else [inputs.sink[first + member].double().expand(end - begin, 1)]
            p = torch.softmax(torch.cat([scores, *sink], dim=-1), dim=-1)[:, : case.seqlen_k].nan_to_num(nan=0.0)
            out[begin:end, member] = out_part = p @ v
            dv += p.T @ dout_part
            ds = p * (dout_part @ v.T - (dout_part * out_part).sum(-1, keepdim=True))
            if slope is not None:
                ds *= slope
            dq[begin:end, member] = ds @ k * case.scale
            dk += ds.T @ q_part * case.scale
    return Expected(out, dq, dk, dv)


def _scores(case: Case, inputs: Inputs, q: Tensor, k: Tensor, head: int, begin: int) -> tuple[Tensor, Tensor | None]:
    """The scores of some queries (from number `begin`) of one head, and what softcap multiplies their gradient by."""
    scores = q @ k.T * case.scale
    slope = None
    if case.softcap:
        bounded = torch.tanh(scores / case.softcap)
        scores, slope = case.softcap * bounded, 1 - bounded * bounded
    if inputs.slopes is not None:
        rows, keys = q.shape[0], k.shape[0]
        position = torch.arange(begin, begin + rows, device=q.device) + (keys - case.seqlen_q)
        distance = (position[:, None] - torch.arange(keys, device=q.device)[None, :]).abs()
        scores = scores - inputs.slopes[head].double() * distance
    if inputs.bias is not None:
        scores = scores + inputs.bias[0, head, begin : begin + q.shape[0]].double()
    return scores, slope


def _relative(found: Tensor, wanted: Tensor) -> float:
    largest = float(wanted.abs().max()) or 1.0
    return float((found.double() - wanted).abs().max()) / largest
