"""The feed-forward half of a block: GELU as GPT-2 and BERT have it, SwiGLU and GeGLU as later models do.

Shapes: B batch, S sequence, E embedding width, F width inside (config name `ffn`).
`chunk`, an attribute of both: tokens computed at once, where there are more (None: all; see feed_forward_pieces.py),
in layers that nothing has replaced.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.errors import unknown
from flashtrain.models.feed_forward_pieces import feed_forward_pieces
from flashtrain_kernels import gelu_feed_forward


class GeluFeedForward(nn.Module):
    """down(gelu(up(x))), GELU in its tanh form (Hendrycks and Gimpel 2016; GPT-2's "gelu_new")."""

    def __init__(self, embed: int, ffn: int, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(embed, ffn, bias=bias)
        self.down = nn.Linear(ffn, embed, bias=bias)
        self.chunk: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, E) -> (B, S, E)."""
        up, down = self.up, self.down
        if self.chunk is not None and x.shape[:-1].numel() > self.chunk and _plain(up, down):
            return feed_forward_pieces(x, up, down, "gelu", self.chunk)
        if _plain(up, down) and up.bias is not None and down.bias is not None:
            return gelu_feed_forward(x, up.weight, up.bias, down.weight, down.bias)
        return down(F.gelu(up(x), approximate="tanh"))


class ExactGeluFeedForward(GeluFeedForward):
    """down(gelu(up(x))) with GELU by the error function: transformers' BERT, whose "gelu" it is."""

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, E) -> (B, S, E)."""
        up, down = self.up, self.down
        if self.chunk is not None and x.shape[:-1].numel() > self.chunk and _plain(up, down):
            return feed_forward_pieces(x, up, down, "gelu_exact", self.chunk)
        return down(F.gelu(up(x)))


class SwiGLUFeedForward(nn.Module):
    """down(silu(gate(x)) * value(x)) (Shazeer 2020, "GLU Variants Improve Transformer"); both from one matrix."""

    name = "swiglu"

    def __init__(self, embed: int, ffn: int, bias: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(embed, 2 * ffn, bias=bias)  # rows: gate first, then value
        self.down = nn.Linear(ffn, embed, bias=bias)
        self.chunk: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, E) -> (B, S, E)."""
        if self.chunk is not None and x.shape[:-1].numel() > self.chunk and _plain(self.up, self.down):
            return feed_forward_pieces(x, self.up, self.down, self.name, self.chunk)
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(self.gated(gate) * value)

    def gated(self, gate: Tensor) -> Tensor:
        """The activation function."""
        return F.silu(gate)


class GeGLUFeedForward(SwiGLUFeedForward):
    """down(gelu(gate(x)) * value(x)) (Shazeer 2020), GELU by the error function, as ModernBERT has it."""

    name = "geglu"

    def gated(self, gate: Tensor) -> Tensor:
        """The activation function."""
        return F.gelu(gate)


def _plain(*layers: nn.Module) -> bool:
    """Not layers that a program has put in their place (adapters, quantised ones), with a forward of their own."""
    return all(type(layer) is nn.Linear for layer in layers)


FEED_FORWARDS: dict[str, type[GeluFeedForward] | type[SwiGLUFeedForward]] = {
    "gelu": GeluFeedForward,
    "gelu_exact": ExactGeluFeedForward,
    "swiglu": SwiGLUFeedForward,
    "geglu": GeGLUFeedForward,
}
GATED = ("swiglu", "geglu")  # two matrices read the input, not one


def feed_forward(activation: str, embed: int, ffn: int, bias: bool) -> GeluFeedForward | SwiGLUFeedForward:
    """The feed-forward of that activation, a name of FEED_FORWARDS. UserError: no such activation."""
    if activation not in FEED_FORWARDS:
        raise unknown("activation", activation, FEED_FORWARDS)
    return FEED_FORWARDS[activation](embed, ffn, bias)
