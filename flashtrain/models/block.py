"""One Transformer layer: attention, norms and a feed-forward.

Shapes: B batch, S sequence, E embedding width, F width inside the feed-forward (config name `ffn`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.errors import at_least, between, one_of
from flashtrain.models.attention import AnyMask, Attention
from flashtrain.models.cache import LayerCache, PackedSequences
from flashtrain.models.memory_savings import MemorySavings, checkpointed, feed_forward_pieces
from flashtrain_kernels import gelu_feed_forward

NORMS = ("layernorm", "rmsnorm")
EPSILON = 1e-5  # GPT-2's
INITIAL_STD = 0.02  # GPT-2's and BERT's
GATED = ("swiglu", "geglu")  # two matrices read the input, not one


def normalization(norm: str, embed: int, bias: bool, epsilon: float = EPSILON) -> nn.LayerNorm | nn.RMSNorm:
    """The norm named by one of NORMS (RMSNorm, Zhang and Sennrich 2019, has no bias)."""
    norms: dict[str, Any] = {"layernorm": partial(nn.LayerNorm, bias=bias), "rmsnorm": nn.RMSNorm}
    return norms[norm](embed, eps=epsilon)


class GeluFeedForward(nn.Module):
    """down(gelu(up(x))), GELU in its tanh form (Hendrycks and Gimpel 2016; GPT-2's "gelu_new")."""

    def __init__(self, embed: int, ffn: int, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(embed, ffn, bias=bias)
        self.down = nn.Linear(ffn, embed, bias=bias)
        self.chunk: int | None = None  # tokens computed at once (None: all); see memory_savings.py

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, E) -> (B, S, E)."""
        up, down = self.up, self.down
        if self.chunk is not None and x.shape[:-1].numel() > self.chunk and _plain(up, down):
            return feed_forward_pieces(x, up, down, "gelu", self.chunk)
        if _plain(up, down) and up.bias is not None and down.bias is not None:
            return gelu_feed_forward(x, up.weight, up.bias, down.weight, down.bias)
        return down(F.gelu(up(x), approximate="tanh"))


class ExactGeluFeedForward(GeluFeedForward):
    """down(gelu(up(x))), GELU by the error function (the "gelu" of transformers' BERT)."""

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
        self.up = nn.Linear(embed, 2 * ffn, bias=bias)  # rows: the gate, then the value
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
    """down(gelu(gate(x)) * value(x)) (Shazeer 2020), GELU by the error function, as in ModernBERT."""

    name = "geglu"

    def gated(self, gate: Tensor) -> Tensor:
        """The activation function."""
        return F.gelu(gate)


def _plain(*layers: nn.Module) -> bool:
    """Whether all are nn.Linear, and not adapters or quantized layers in their place, which have their own forward."""
    return all(type(layer) is nn.Linear for layer in layers)


FEED_FORWARDS: dict[str, type[GeluFeedForward] | type[SwiGLUFeedForward]] = {
    "gelu": GeluFeedForward,
    "gelu_exact": ExactGeluFeedForward,
    "swiglu": SwiGLUFeedForward,
    "geglu": GeGLUFeedForward,
}


def feed_forward(activation: str, embed: int, ffn: int, bias: bool) -> GeluFeedForward | SwiGLUFeedForward:
    """The feed-forward with an activation named in FEED_FORWARDS."""
    return FEED_FORWARDS[activation](embed, ffn, bias)


def start_normal(model: nn.Module) -> None:
    """Initialize as GPT-2 and BERT: weights normal(0, 0.02), biases 0, norms 1 and 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=INITIAL_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()


def check_shape(config: Any, sizes: Sequence[str], names: Mapping[str, Iterable[str]]) -> None:
    """Raise UserError for what no configuration may have: sizes below 1, fewer embedding rows than tokens, a dropout
    outside [0, 1), an unknown value of `names` (field -> possible values)."""
    for name in sizes:
        at_least(name, getattr(config, name), 1)
    at_least("vocab_rows", getattr(config, "vocab_rows", config.vocab_size), config.vocab_size)
    between("dropout", config.dropout, 0, 1, include_high=False)
    for name, possible in names.items():
        one_of(name, getattr(config, name), possible)


class Block(nn.Module):
    """Pre-norm Transformer block (GPT-2): x + attention(norm(x)), then x + feed_forward(norm(x)).

    Args:
        embed, heads, kv_heads, causal, attention, rotary: See Attention.
        ffn: Width F inside the feed-forward.
        norm: "layernorm" or "rmsnorm", with this epsilon.
        activation: A name in FEED_FORWARDS.
        bias: Whether projections and LayerNorm have biases.
        dropout: Probability, for attention weights and for both branches before they are added.
    """

    def __init__(
        self,
        embed: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        ffn: int,
        norm: str = "layernorm",
        activation: str = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        causal: bool = True,
        attention: str = "flash",
        rotary: nn.Module | None = None,
        epsilon: float = EPSILON,
    ) -> None:
        super().__init__()
        self.attention_norm = normalization(norm, embed, bias, epsilon)
        self.attention = Attention(
            embed, heads, kv_heads, causal=causal, bias=bias, dropout=dropout, attention=attention, rotary=rotary
        )
        self.feed_forward_norm = normalization(norm, embed, bias, epsilon)
        self.feed_forward = feed_forward(activation, embed, ffn, bias)
        self.dropout = nn.Dropout(dropout)
        self.savings = MemorySavings()
        self._compiled: Callable[..., Tensor] | None = None

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        mask: AnyMask | PackedSequences | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """x (B, S, E) -> (B, S, E); positions, mask and cache as in Attention.forward."""
        compute = self.compute if self._compiled is None or cache is not None else self._compiled
        if self.savings.checkpointing == "none" or cache is not None or not torch.is_grad_enabled():
            return compute(x, positions=positions, mask=mask, cache=cache)
        dropout = self.attention.active_dropout
        return checkpointed(compute, x, savings=self.savings, dropout=dropout, positions=positions, mask=mask)

    def compute(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        mask: AnyMask | PackedSequences | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """The forward without checkpointing; arguments as there."""
        attended = self.attention(self.attention_norm(x), positions=positions, mask=mask, cache=cache)
        x = x + self.dropout(attended)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))

    def save_memory(self, savings: MemorySavings) -> None:
        """Use these savings from now on."""
        self.savings = savings
        self.feed_forward.chunk = savings.ffn_chunk

    def compile_inside(self, **options: Any) -> None:
        """Compile `compute` by torch.compile; checkpointing and its hooks stay outside of compiled code."""
        self._compiled = torch.compile(self.compute, **options)

    def residual_projections(self) -> tuple[nn.Linear, nn.Linear]:
        """The two layers that write into the residual stream (GPT-2 initializes them smaller in deeper models)."""
        return self.attention.output, self.feed_forward.down


class PostNormBlock(Block):
    """The original Transformer's block (Vaswani et al. 2017; BERT): each norm follows the sum with its branch.

    Arguments as Block. The sums keep the input's dtype, also where norms under autocast return float32.
    """

    def compute(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        mask: AnyMask | PackedSequences | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """norm(x + attention(x)), then norm(x + feed_forward(x)): x (B, S, E) -> (B, S, E)."""
        dtype = x.dtype
        attended = self.attention(x, positions=positions, mask=mask, cache=cache)
        x = self.attention_norm(x + self.dropout(attended)).to(dtype)
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x))).to(dtype)
