"""Linear attention: a token reads q S, where a head's state S decays and gains k v^T, and a norm
takes the place of softmax's denominator.

- retention: decays of 1 - 2^(-5 - head), rotated q and k (Sun et al. 2023, "Retentive Network");
- lightning: ALiBi's slopes as decays, SiLU of q, k, v (Qin et al. 2024, "Lightning Attention-2");
- gla: a decay for each token and head, sigmoid(x w)^(1/16) (Yang et al. 2023, "Gated Linear
  Attention", with one number a head, as in Sun et al. 2024, "You Only Cache Once");
- norm_attention: no decay, 1 + elu of q and k (Qin et al. 2022, "The Devil in Linear Transformer").

Shapes: B batch, S sequence, H heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.models.mixer import Rotary
from flashtrain.models.positions import check_rotary
from flashtrain.models.state_mixer import OwnStateSpec, StateCache, StateMixer
from flashtrain_kernels import recurrences
from flashtrain_kernels.recurrences import Rows

EPSILON = 1e-5  # of the norm
ROOT = 16  # of a gate: decays near 1 keep far tokens
# Rows would become inputs of the graph, and be guarded by their values.
decayed_sum = torch.compiler.disable(recurrences.decayed_sum)


class LinearAttention(StateMixer):
    """Linear attention of one of the kinds above. `inputs` has rows for q, k, v, but for
    norm_attention those of the output's gate, and for gla those of the decays."""

    def __init__(self, embed: int, spec: Any, bias: bool, rotary: Rotary | None) -> None:
        super().__init__(embed, spec, bias, rotary)
        self.parts = [spec.inner] * (3 + spec.gated) + [spec.heads] * (spec.kind == "gla")
        self.inputs = nn.Linear(embed, sum(self.parts), bias=bias)
        self.norm = nn.RMSNorm(spec.inner if spec.norms_together else spec.head_dim, eps=EPSILON)
        self.output = nn.Linear(spec.inner, embed, bias=bias)
        self.rotary = None
        if spec.kind == "retention" and rotary is not None:
            check_rotary(spec.head_dim, 2.0)
            self.rotary = rotary(spec.head_dim)

    def mix(self, x: Tensor, positions: Any, rows: Rows, cache: StateCache | None) -> Tensor:
        q, k, v, *others = x.split(self.parts, 2)
        if self.spec.kind == "lightning":
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        elif self.spec.kind == "norm_attention":
            q, k = 1 + F.elu(q), 1 + F.elu(k)
        q, k, v = (one.unflatten(2, (self.spec.heads, -1)) for one in (q, k, v))
        if self.rotary is not None:
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        wide = torch.promote_types(x.dtype, torch.float32)
        g = self.decays(wide, x.device).expand(*x.shape[:2], -1)
        if self.spec.kind == "gla":
            g = F.logsigmoid(others[1].to(wide)) / ROOT
        out = decayed_sum(v, g, k, q, rows)
        out = self.norm(out.flatten(2)) if self.spec.norms_together else self.norm(out).flatten(2)
        if not self.spec.gated:
            return out
        return out * (F.sigmoid if self.spec.kind == "lightning" else F.silu)(others[0])

    def decays(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the logarithms of the heads' constant decays, (H,)."""
        head = torch.arange(self.spec.heads, dtype=dtype, device=device)
        if self.spec.kind == "retention":
            return torch.log1p(-(2 ** (-5 - head)))
        slopes = 2 ** (-8 * (head + 1) / self.spec.heads)
        return -slopes if self.spec.kind == "lightning" else 0 * slopes


class RetentionSpec(OwnStateSpec):
    kind, mixer = "retention", LinearAttention
    gated = True  # what is read, by the token
    norms_together = False  # all heads, as MiniMax and TransNormer; else each head


class LightningSpec(RetentionSpec):
    kind, norms_together = "lightning", True


class GatedSpec(RetentionSpec):
    kind = "gla"


class NormSpec(LightningSpec):
    kind, gated = "norm_attention", False
