"""Layers that pass states over several devices, measured instead of attention: the operators of
the gated delta rule, and of linear attention that only decays.

B batch (1), n tokens a rank holds, H heads, D head dimension, of keys and of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashtrain.distributed.context.sequence import ContextSequence
from flashtrain.distributed.context.traffic import Traffic
from flashtrain.models.state_spec import DeltaSpec, GatedSpec
from flashtrain_kernels.recurrences import Rows, decayed_sum, gated_delta_rule
from flashtrain_recipes.attention_benchmark.baselines.base import Attend
from flashtrain_recipes.attention_benchmark.inputs import Inputs
from flashtrain_recipes.attention_benchmark.reference import Expected
from flashtrain_recipes.context_benchmark.baseline import Attention, ContextBaseline, Place
from flashtrain_recipes.context_benchmark.cases import ContextCase

SPECS = {"delta": DeltaSpec, "gla": GatedSpec}
DECAY, REPLACED = -0.05, 0.5  # of every token: a kernel takes as long with any


@dataclass(frozen=True)
class StateCase(ContextCase):
    """One layer with states; `attention` has its sizes, and a full mask, under which all layouts
    are as even as they are for states."""

    mixer: str = "delta"

    @property
    def spec(self) -> Any:
        """The layer as plain values."""
        return SPECS[self.mixer](self.attention.heads, self.attention.head_dim)

    @property
    def flops(self) -> float:
        return self.attention.seqlen_q * self.spec.flops(self.attention.seqlen_q)

    def columns(self) -> dict[str, Any]:
        return {**super().columns(), "mask": self.mixer}

    def __str__(self) -> str:
        return super().__str__().replace(self.attention.mask, self.mixer, 1)

    def read(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        """Return what tokens read of the states; all (B, n, H, D)."""
        g = torch.full(v.shape[:3], DECAY, device=v.device)
        if self.mixer == "gla":
            return decayed_sum(v, g, k, q, rows)
        beta = torch.full_like(g, REPLACED, dtype=v.dtype)
        return gated_delta_rule(q, k, v, g, beta, rows, normalize=True)

    def attend(self, device: torch.device) -> Attend:
        rows = Rows(torch.arange(self.attention.seqlen_q, device=device)[None])
        return lambda one: self.read(one.q, one.k, one.v, rows)

    def expected(self, inputs: Inputs, device: torch.device) -> Expected:
        given = inputs.q, inputs.k, inputs.v, inputs.dout
        q, k, v, dout = (x[:, :, -1:].detach().double().requires_grad_() for x in given)
        out = self.attend(device)(Inputs(q, k, v, dout))
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
        return Expected(out.detach()[0], dq[0], dk[0, :, 0], dv[0, :, 0])


class States(ContextBaseline):
    """flashtrain's way: all ranks gather the maps of all runs of tokens at once."""

    separable = False

    def refuses(self, case: Any) -> str | None:
        one = case.attention
        return None if one.kv_heads == one.heads else "as many keys as values are expected"

    def attend(self, place: Place, q: Tensor, k: Tensor, v: Tensor) -> Attention:
        case: Any = place.case
        sequence = ContextSequence(place.layout(self.layout), place.team.group)
        positions = sequence.positions(sequence.held, q.device)
        rows = sequence.rows(positions, torch.arange(sequence.length, device=q.device)[None])
        runs = 1 + int((positions.diff() != 1).sum())
        sent = 4 * case.spec.passed * runs * (case.degree - 1)  # float32
        return Attention(lambda q, k, v: case.read(q, k, v, rows), Traffic(sent, sent))


BASELINES = tuple(States("flashtrain", "states", one) for one in ("contiguous", "zigzag"))
