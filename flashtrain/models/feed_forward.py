"""The feed-forward half of a block: GELU as GPT-2 has it, SwiGLU as later models do.

Shapes: B batch, S sequence, E embedding width, F width inside (config name `ffn`).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.errors import unknown
from flashtrain_kernels import gelu_feed_forward


class GeluFeedForward(nn.Module):
    """down(gelu(up(x))), GELU in its tanh form (Hendrycks and Gimpel 2016; GPT-2's "gelu_new")."""

    def __init__(self, embed: int, ffn: int, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(embed, ffn, bias=bias)
        self.down = nn.Linear(ffn, embed, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, E) -> (B, S, E)."""
        up, down = self.up, self.down
        # Layers that a program has put in their place (adapters, quantised ones) have a forward of their own.
        if type(up) is nn.Linear and type(down) is nn.Linear and up.bias is not None and down.bias is not None:
            return gelu_feed_forward(x, up.weight, up.bias, down.weight, down.bias)
        return down(F.gelu(up(x), approximate="tanh"))


class SwiGLUFeedForward(nn.Module):
    """down(silu(gate(x)) * value(x)) (Shazeer 2020, "GLU Variants Improve Transformer"); both from one matrix."""

    def __init__(self, embed: int, ffn: int, bias: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(embed, 2 * ffn, bias=bias)  # rows: gate first, then value
        self.down = nn.Linear(ffn, embed, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, E) -> (B, S, E)."""
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


FEED_FORWARDS: dict[str, type[GeluFeedForward] | type[SwiGLUFeedForward]] = {
    "gelu": GeluFeedForward,
    "swiglu": SwiGLUFeedForward,
}


def feed_forward(activation: str, embed: int, ffn: int, bias: bool) -> GeluFeedForward | SwiGLUFeedForward:
    """The feed-forward of that activation ("gelu" or "swiglu"). UserError: no such activation."""
    if activation not in FEED_FORWARDS:
        raise unknown("activation", activation, FEED_FORWARDS)
    return FEED_FORWARDS[activation](embed, ffn, bias)
