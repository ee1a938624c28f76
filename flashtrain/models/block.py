"""One Transformer layer, causal (a decoder's) or not (an encoder's).

Shapes: B batch, S sequence, E embedding width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flashtrain.models.activation_checkpointing import checkpointed
from flashtrain.models.attention import Attention
from flashtrain.models.attention_functions import AnyMask
from flashtrain.models.cache import LayerCache
from flashtrain.models.feed_forward import feed_forward
from flashtrain.models.memory_savings import MemorySavings
from flashtrain.models.normalization import EPSILON, normalization
from flashtrain.models.packed_sequences import PackedSequences


class Block(nn.Module):
    """Pre-norm Transformer block (GPT-2): x + attention(norm(x)), then x + feed_forward(norm(x)).

    embed, heads, kv_heads, causal, attention, rotary: see Attention. ffn: width inside the feed-forward.
    norm: "layernorm" or "rmsnorm", epsilon its own. activation: see feed_forward.py. bias: of all projections and of
    LayerNorm.
    dropout: of the attention weights and of both branches before they are added. UserError: an unknown name.
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
        """What forward returns, without checkpointing."""
        attended = self.attention(self.attention_norm(x), positions=positions, mask=mask, cache=cache)
        x = x + self.dropout(attended)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))

    def save_memory(self, savings: MemorySavings) -> None:
        """From now on compute with these savings."""
        self.savings = savings
        self.feed_forward.chunk = savings.ffn_chunk

    def compile_inside(self, **options: Any) -> None:
        """Runs `compute` through torch.compile, so that checkpointing and its hooks stay outside of compiled code."""
        self._compiled = torch.compile(self.compute, **options)

    def residual_projections(self) -> tuple[nn.Linear, nn.Linear]:
        """The two layers that write into the residual stream (GPT-2 starts them smaller the deeper the model)."""
        return self.attention.output, self.feed_forward.down


class PostNormBlock(Block):
    """The original Transformer's block (Vaswani et al. 2017; BERT): each norm comes after the sum with its branch.

    Arguments as Block. The sums are kept in the type that the block is given, also where autocast's norms give float32.
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
        kept = x.dtype
        attended = self.attention(x, positions=positions, mask=mask, cache=cache)
        x = self.attention_norm(x + self.dropout(attended)).to(kept)
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x))).to(kept)
