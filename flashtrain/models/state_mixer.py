"""The module of mixers that keep states (state_spec.py), with its decode state.

Shapes: B batch, S sequence, E embedding width, H heads, K and V of a state, C channels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.models.mixer import Rotary
from flashtrain_kernels.recurrences import (
    Rows,
    decayed_sum,
    gated_delta_rule,
    short_convolution,
    state_space,
)

WIDTH = 4  # tokens of the convolution
EPSILON = 1e-5  # of the norm
ROOT = 16  # of a gate: decays near 1 keep far tokens
STEPS = (1e-3, 1e-1)  # softplus of dt_bias, at the start


class StateCache:
    """The state after the tokens that a layer has read, and the last inputs of its convolution."""

    length = 0
    state: Tensor | None = None  # (B, H, K, V)
    last: Tensor | None = None

    def rows(self, x: Tensor, spec: Any) -> Rows:
        """Return the rows of x (B, S, ...), one document each, with the states before them."""
        rows = Rows(torch.arange(x.shape[1], device=x.device).expand(len(x), -1))
        sizes = len(x), spec.heads, spec.key_dim, spec.head_dim
        wide = torch.promote_types(x.dtype, torch.float32)
        rows.state = x.new_zeros(sizes, dtype=wide) if self.state is None else self.state
        return rows


class StateMixer(nn.Module):
    """A mixer of an OwnStateSpec. `inputs` has rows for the output's gate, what is mixed (q, k, v;
    of mamba2 x, B, C) and the rates, by which states decay (and of delta what is replaced)."""

    active_dropout = 0.0

    def __init__(self, embed: int, spec: Any, bias: bool, rotary: Rotary | None) -> None:
        super().__init__()
        self.spec, mixed = spec, sum(spec.parts)
        self.inputs = nn.Linear(embed, sum(spec.widths), bias=bias)
        self.norm = nn.RMSNorm(spec.inner if spec.together else spec.head_dim, eps=EPSILON)
        self.output = nn.Linear(spec.inner, embed, bias=bias)
        turned, spaces = rotary if spec.kind == "retention" else None, spec.kind == "mamba2"
        self.rotary = None if turned is None else turned(spec.head_dim)
        self.D = nn.Parameter(torch.empty(spec.heads)) if spaces else None
        if spec.convolved:
            self.conv1d = nn.Conv1d(mixed, mixed, WIDTH, groups=mixed, bias=spaces)
            self.A_log, self.dt_bias = (nn.Parameter(torch.empty(spec.heads)) for _ in range(2))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize what is no module's."""
        if self.spec.convolved:
            self.A_log.uniform_(1, 16).log_()
            step = self.dt_bias.uniform_(*map(math.log, STEPS)).exp()
            self.dt_bias.copy_(step.expm1().log())  # softplus backwards
        if self.D is not None:
            self.D.fill_(1)

    def forward(
        self, x: Tensor, *, positions: Any = None, mask: Any = None, cache: Any = None
    ) -> Tensor:
        """Compute (B, S, E) from x (B, S, E). mask: the documents (layer_masks), unless there is a
        cache."""
        spec, rows = self.spec, mask if cache is None else cache.rows(x, self.spec)
        gate, mixed, rates = self.inputs(x).split(spec.widths, 2)
        if spec.convolved:
            mixed = self.convolve(mixed, rows, cache)
        out = self.read(mixed, rates, positions, rows)
        if cache is not None:
            cache.state, cache.length = rows.state, cache.length + x.shape[1]
        out = out.flatten(2) if spec.together else out
        if self.D is not None:  # mamba2
            return self.output(self.norm(out * F.silu(gate)))
        out = self.norm(out).flatten(2)
        if spec.gated:
            out = out * (F.sigmoid if spec.kind == "lightning" else F.silu)(gate)
        return self.output(out)

    def convolve(self, x: Tensor, rows: Rows, cache: StateCache | None) -> Tensor:
        """Return x (B, S, C), convolved within documents, or with a cache after its last inputs."""
        tokens = x.shape[1]
        if cache is not None:
            empty = x.new_zeros(len(x), WIDTH - 1, x.shape[2])
            x = torch.cat((empty if cache.last is None else cache.last, x), 1)
            cache.last, rows = x[:, 1 - WIDTH :], cache.rows(x, self.spec)
        given = x.mT, self.conv1d.weight[:, 0], self.conv1d.bias, rows
        return short_convolution(*given, silu=True).mT[:, -tokens:]

    def read(self, x: Tensor, rates: Tensor, positions: Any, rows: Rows) -> Tensor:
        """Return what the tokens read of the heads' states, (B, S, H, V)."""
        spec, wide = self.spec, torch.promote_types(x.dtype, torch.float32)
        x = F.silu(x) if spec.kind == "lightning" else x
        dims = spec.head_dim, spec.key_dim, spec.key_dim
        parts = zip(x.split(spec.parts, 2), dims, strict=True)
        q, k, v = (part.unflatten(2, (-1, dim)) for part, dim in parts)
        if spec.kind == "norm_attention":
            q, k = 1 + F.elu(q), 1 + F.elu(k)
        if self.rotary is not None:
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        if not spec.convolved:
            return decayed_sum(v, self.decays(rates.to(wide)), k, q, rows)
        step = F.softplus(rates[..., : spec.heads].to(wide) + self.dt_bias)
        rate = -self.A_log.to(wide).exp()
        if self.D is not None:
            return state_space(q, step, rate, k, v, rows, self.D)
        beta = rates[..., spec.heads :].sigmoid()
        return gated_delta_rule(q, k, v, rate * step, beta, rows, normalize=True)

    def decays(self, rates: Tensor) -> Tensor:
        """Return the logarithms of linear attention's decays, (B, S, H)."""
        kind = self.spec.kind
        if kind == "gla":
            return F.logsigmoid(rates) / ROOT
        head = torch.arange(self.spec.heads, dtype=rates.dtype, device=rates.device)
        if kind == "retention":
            each = torch.log1p(-(2 ** (-5 - head)))
        elif kind == "lightning":
            each = -(2 ** (-8 * (head + 1) / len(head)))
        else:  # norm_attention: none
            each = 0 * head
        return each.expand(*rates.shape[:2], -1)
