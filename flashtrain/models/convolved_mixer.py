"""Recurrences behind a short convolution, with a gated norm after them:

- delta: the gated delta rule (Yang et al. 2024, "Gated Delta Networks"), as Qwen3-Next's;
- mamba2: a state space (Dao and Gu 2024, "Transformers are SSMs"), as Bamba's and Granite 4's.

Shapes: B batch, S sequence, H heads, K (also N) and V (also P) of a head, C channels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.models.mixer import Rotary
from flashtrain.models.state_mixer import OwnStateSpec, StateCache, StateMixer
from flashtrain_kernels import recurrences
from flashtrain_kernels.recurrences import Rows

WIDTH = 4  # tokens of the convolution
EPSILON = 1e-5  # of the norm
STEPS = (1e-3, 1e-1)  # softplus of dt_bias, at the start


class ConvolvedMixer(StateMixer):
    """The gated delta rule or a state space. `inputs` has rows for the output's gate, what is
    convolved (q, k, v; or x, B, C), the steps and, for the delta rule, what is replaced (beta)."""

    def __init__(self, embed: int, spec: Any, bias: bool, rotary: Rotary | None) -> None:
        super().__init__(embed, spec, bias, rotary)
        delta, convolved = spec.delta, sum(spec.parts)
        self.parts = [spec.inner, convolved, spec.heads] + [spec.heads] * delta
        self.inputs = nn.Linear(embed, sum(self.parts), bias=bias)
        self.convolution = nn.Parameter(torch.empty(convolved, WIDTH))
        self.convolution_bias = None if delta else nn.Parameter(torch.empty(convolved))
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(spec.heads)) for _ in range(2))
        self.D = None if delta else nn.Parameter(torch.empty(spec.heads))
        self.norm = nn.RMSNorm(spec.head_dim if delta else spec.inner, eps=EPSILON)
        self.output = nn.Linear(spec.inner, embed, bias=bias)

    def reset_parameters(self) -> None:
        for one in (self.convolution, self.convolution_bias):
            if one is not None:
                nn.init.uniform_(one, -(WIDTH**-0.5), WIDTH**-0.5)  # torch's
        with torch.no_grad():
            self.A_log.uniform_(1, 16).log_()
            step = self.dt_bias.uniform_(*map(math.log, STEPS)).exp()
            self.dt_bias.copy_(step.expm1().log())  # softplus backwards
        if self.D is not None:
            nn.init.ones_(self.D)

    def mix(self, x: Tensor, positions: Any, rows: Rows, cache: StateCache | None) -> Tensor:
        gate, x, step, *beta = x.split(self.parts, 2)
        wide = torch.promote_types(x.dtype, torch.float32)
        step, rate = F.softplus(step.to(wide) + self.dt_bias), -self.A_log.to(wide).exp()
        x, B, C = self.convolved(x, rows, cache).split(self.spec.parts, 2)
        x = x.unflatten(2, (self.spec.heads, -1))
        B, C = (one.unflatten(2, (-1, self.spec.key_dim)) for one in (B, C))
        if not beta:
            out = state_space(x, step, rate, B, C, rows, self.D)
            return self.norm(out.flatten(2) * F.silu(gate))
        given = x, B, C, rate * step, beta[0].sigmoid()
        out = gated_delta_rule(*given, rows, normalize=True)
        return self.norm(out).flatten(2) * F.silu(gate)

    def convolved(self, x: Tensor, rows: Rows, cache: StateCache | None) -> Tensor:
        """Return x (B, S, C), convolved within documents, or with a cache after its last inputs."""
        tokens = x.shape[1]
        if cache is not None:
            empty = x.new_zeros(len(x), WIDTH - 1, x.shape[2])
            x = torch.cat((empty if cache.last is None else cache.last, x), 1)
            cache.last, rows = x[:, 1 - WIDTH :], cache.rows(x, self.spec)
        given = x.mT, self.convolution, self.convolution_bias, rows
        return short_convolution(*given, silu=True).mT[:, -tokens:]


# Rows would become inputs of the graph, and be guarded by their values.
short_convolution, gated_delta_rule, state_space = map(
    torch.compiler.disable,
    (recurrences.short_convolution, recurrences.gated_delta_rule, recurrences.state_space),
)


class DeltaSpec(OwnStateSpec):
    kind, mixer, delta = "delta", ConvolvedMixer, True


class Mamba2Spec(OwnStateSpec):
    kind, mixer, expand, groups = "mamba2", ConvolvedMixer, 2, 1
    key_dim = 128
