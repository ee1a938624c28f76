"""GPT-2 (Radford et al. 2019) and, from the same block, a Llama-style decoder ("modern").

    config = GPT2Config.of_size("124m", vocab_size=50257, context=1024)
    model = GPT2(config, attention="flash")
    loss = model.loss(tokens, labels)               # tokens, labels (B, S) int64; labels[b, s] follows tokens[b, s]

Shapes: B batch, S sequence, E embedding width, V rows of the embedding table (vocab_rows).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.errors import UserError, one_of
from flashtrain.models.attention import AnyMask, check_heads, plan_mask
from flashtrain.models.block import FEED_FORWARDS, INITIAL_STD, NORMS, Block, check_shape, normalization, start_normal
from flashtrain.models.cache import KeyValueCache, next_positions
from flashtrain.models.memory_savings import MemorySavings
from flashtrain.models.positions import LearnedPositions, RotaryPositions, check_learned, check_rotary, rotary_base_for
from flashtrain.models.trainable import Trainable
from flashtrain.settings import options
from flashtrain_kernels import linear_cross_entropy
from flashtrain_kernels.environment import autocast_dtype

POSITIONS = get_args(options.Positions)
RESIDUALS = get_args(options.Residual)
FAMILIES = ("gpt2", "modern")
IGNORED = -100  # a label of this value is not scored (torch's convention)


class Size(NamedTuple):
    """A row of SIZES. modern_kv_heads: one key/value head per four query heads (five where there are 25)."""

    layers: int
    heads: int
    embed: int
    modern_kv_heads: int


SIZES = {
    "demo": Size(layers=4, heads=4, embed=128, modern_kv_heads=1),  # about 1M parameters with a byte vocabulary
    "124m": Size(layers=12, heads=12, embed=768, modern_kv_heads=3),
    "355m": Size(layers=24, heads=16, embed=1024, modern_kv_heads=4),
    "774m": Size(layers=36, heads=20, embed=1280, modern_kv_heads=5),
    "1.3b": Size(layers=24, heads=16, embed=2048, modern_kv_heads=4),  # GPT-3 XL's width with heads of 128
    "1.5b": Size(layers=48, heads=25, embed=1600, modern_kv_heads=5),
}


@dataclass(frozen=True)
class GPT2Config:
    """The shape of a model; with the weights it is enough to rebuild it.

    Args:
        vocab_size: Tokens.
        vocab_rows: Rows of the embedding table, at least vocab_size (a multiple of 64 is faster); further rows are
            never predicted.
        context: Longest sequence in tokens, a limit with learned positions only.
        ffn: Width inside the feed-forward.
        dropout: Probability, for embeddings, attention weights and both branches of a block.
        rope_base: Base of the rotary angles, as trained first.
        rope_factor: How many times longer the context is than in that training; it raises the base
            (positions.rotary_base_for).

    Raises:
        UserError: Sizes that do not fit together, or an unknown name.
    """

    vocab_size: int
    vocab_rows: int
    context: int
    layers: int
    heads: int
    kv_heads: int
    embed: int
    ffn: int
    positions: str = "learned"
    norm: str = "layernorm"
    activation: str = "gelu"
    bias: bool = True
    dropout: float = 0.0
    tie_embeddings: bool = True
    rope_base: float = 10000.0
    rope_factor: float = 1.0

    def __post_init__(self) -> None:
        names = {"positions": POSITIONS, "norm": NORMS, "activation": FEED_FORWARDS}
        check_shape(self, ("vocab_size", "context", "layers", "ffn"), names)
        head_dim = check_heads(self.embed, self.heads, self.kv_heads)
        if self.positions == "rotary":
            check_rotary(head_dim, self.rope_base)
            rotary_base_for(self.rope_base, self.rope_factor, head_dim)
        elif self.rope_factor != 1:
            raise UserError(f"rope_factor={self.rope_factor:g} with learned positions. Set positions=rotary.")

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    @property
    def scaled_rope_base(self) -> float:
        """The base of the rotary angles, rope_factor included."""
        return rotary_base_for(self.rope_base, self.rope_factor, self.head_dim)

    @classmethod
    def of_size(
        cls,
        size: str,
        family: str = "gpt2",
        *,
        vocab_size: int,
        context: int,
        vocab_rows: int | None = None,
        positions: str | None = None,
        dropout: float = 0.0,
        rope_base: float | None = None,
        rope_factor: float | None = None,
    ) -> GPT2Config:
        """The configuration of a named size; the output head is tied to the embedding table.

        Args:
            size: A name in SIZES.
            family: "gpt2", or "modern" (RMSNorm, SwiGLU, rotary positions, grouped-query, no biases).
            vocab_rows: Rows of the embedding table (None: vocab_size rounded up to a multiple of 64).
            positions: "learned" or "rotary" (None: the family's).
            rope_base, rope_factor: For rotary positions only (None: 10000 and 1).

        Raises:
            UserError: An unknown size or family, or rope_base or rope_factor with learned positions.
        """
        one_of("model size", size, SIZES)
        one_of("model family", family, FAMILIES)
        modern = family == "modern"
        row = SIZES[size]
        positions = positions or ("rotary" if modern else "learned")
        if rope_base is not None and positions != "rotary":
            raise UserError(f"rope_base={rope_base:g} with {positions} positions. Set positions=rotary.")
        return cls(
            vocab_size=vocab_size,
            vocab_rows=round_up(vocab_size, 64) if vocab_rows is None else vocab_rows,
            context=context,
            layers=row.layers,
            heads=row.heads,
            kv_heads=row.modern_kv_heads if modern else row.heads,
            embed=row.embed,
            # SwiGLU has three matrices for GELU's two: 8/3 E instead of 4 E keeps the parameters equal.
            ffn=round_up(math.ceil(row.embed * 8 / 3), 128) if modern else 4 * row.embed,
            positions=positions,
            norm="rmsnorm" if modern else "layernorm",
            activation="swiglu" if modern else "gelu",
            bias=not modern,
            dropout=dropout,
            rope_base=10000.0 if rope_base is None else rope_base,
            rope_factor=1.0 if rope_factor is None else rope_factor,
        )


class GPT2(Trainable):
    """The decoder: embedding, blocks, final norm, output head (tied to the embedding table or not).

    Args:
        attention: "flash", "sdpa" or "standard"; it changes speed and memory, not the result or the weights.
        residual: Dtype of the residual stream under autocast: "weights" (the weights' own, float32) or "compute"
            (autocast's: half the traffic, and each block's sum is rounded to it).

    Raises:
        UserError: An unknown attention or residual.
    """

    def __init__(self, config: GPT2Config, attention: str = "flash", residual: str = "compute") -> None:
        super().__init__()
        one_of("residual", residual, RESIDUALS)
        self.residual = residual
        self.config = config
        self.attention = attention
        self.token_embedding = nn.Embedding(config.vocab_rows, config.embed)
        learned = config.positions == "learned"
        self.position_embedding = LearnedPositions(config.context, config.embed) if learned else None
        rotary = None if learned else RotaryPositions(config.head_dim, config.scaled_rope_base)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(
                config.embed,
                config.heads,
                config.kv_heads,
                ffn=config.ffn,
                norm=config.norm,
                activation=config.activation,
                bias=config.bias,
                dropout=config.dropout,
                causal=True,
                attention=attention,
                rotary=rotary,
            )
            for _ in range(config.layers)
        )
        self.final_norm = normalization(config.norm, config.embed, config.bias)
        self.head = None if config.tie_embeddings else nn.Linear(config.embed, config.vocab_rows, bias=False)
        self.savings = MemorySavings()
        self.reset_parameters()

    @property
    def shape(self) -> GPT2Config:
        return self.config

    @property
    def generates(self) -> bool:
        return True

    @property
    def recomputes_blocks(self) -> bool:
        return self.savings.checkpointing == "full" or self.savings.offload

    def save_memory(self, savings: MemorySavings) -> None:
        """Use these savings of activation memory from now on; they cost time and change no loss or gradient."""
        self.savings = savings
        for block in self.blocks:
            cast(Block, block).save_memory(savings)

    def compile_blocks(self, **options: Any) -> bool:
        """Compile each block by torch.compile with these options; checkpointing stays outside."""
        for block in self.blocks:
            cast(Block, block).compile_inside(**options)
        return True

    def reset_parameters(self) -> None:
        """GPT-2's initialization: weights normal(0, 0.02), biases 0, residual projections times 1/sqrt(2 layers)."""
        start_normal(self)
        for module in self.modules():
            if isinstance(module, Block):
                for projection in module.residual_projections():
                    nn.init.normal_(projection.weight, std=INITIAL_STD / math.sqrt(2 * self.config.layers))

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        mask: AnyMask | None = None,
        cache: KeyValueCache | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits (B, S, V) for the token after each of tokens (B, S) int64; -inf past vocab_size.

        Args:
            positions: (B, S) integers (None: 0, 1, ..., or continued from the cache).
            mask: Which tokens each token sees, in place of the causal rule (see Attention.forward); planned here once.
            cache: From new_cache(): the earlier tokens, to which these are appended.
            last_only: Whether to return the last token's logits alone, (B, 1, V).

        Raises:
            UserError: Learned positions past the context, a full cache, or a mask of other sizes.
        """
        hidden = self.hidden(tokens, positions=positions, mask=mask, cache=cache)
        return self.logits(hidden[:, -1:] if last_only else hidden)

    def hidden(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        mask: AnyMask | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """The states (B, S, E) that the output head reads; arguments as in forward."""
        if self.position_embedding is not None:
            check_learned(tokens.shape[1] + (cache.length if cache is not None else 0), self.config.context)
        if positions is None:
            positions = next_positions(tokens.shape[1], cache, tokens.device)
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        x = self.dropout(x)
        if self.residual == "compute":
            x = x.to(autocast_dtype(x.device.type) or x.dtype)
        dropout = self.config.dropout if self.training else 0.0
        mask = plan_mask(mask, x, attention=self.attention, head_dim=self.config.head_dim, dropout=dropout)
        for index, block in enumerate(self.blocks):
            layer_cache = cache.layers[index] if cache is not None else None
            x = block(x, positions=positions, mask=mask, cache=layer_cache)
        return self.final_norm(x)

    @property
    def output_weight(self) -> Tensor:
        """The output head's matrix (V, E): the embedding table unless untied."""
        return self.token_embedding.weight if self.head is None else self.head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (B, S, E) -> (B, S, V), -inf past vocab_size."""
        logits = F.linear(hidden, self.output_weight)
        if self.config.vocab_rows > self.config.vocab_size:
            # The logits of imported GPT-2 weights are far below 0, so that added rows of zeros would win every softmax.
            padding = torch.arange(self.config.vocab_rows, device=logits.device) >= self.config.vocab_size
            logits = logits.masked_fill(padding, -torch.inf)
        return logits

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        positions: Tensor | None = None,
        mask: AnyMask | None = None,
    ) -> Tensor:
        """Mean cross-entropy in nats over the labels that are not -100, a scalar; 0 when there are none.

        The loss is float32 whatever the weights or autocast (float64 for a float64 model). The logits of at most a few
        thousand tokens are stored at a time. torch.compile(model.loss, fullgraph=True) works.

        Args:
            tokens: (B, S) int64.
            labels: (B, S) int64, already shifted: labels[b, s] is the token after tokens[b, s].
            positions, mask: As in forward.
        """
        hidden = self.hidden(tokens, positions=positions, mask=mask)
        return linear_cross_entropy(
            hidden,
            self.output_weight,
            labels,
            vocab_size=self.config.vocab_size,
            ignore_index=IGNORED,
            chunk=self.savings.loss_chunk,
        )

    def new_cache(self, tokens: int | None = None) -> KeyValueCache:
        """An empty cache for so many tokens (None: `context`); the first token allocates its memory."""
        return KeyValueCache(self.config.layers, self.config.context if tokens is None else tokens)

    def parameter_count(self) -> int:
        """All parameters; a tied output head is counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, context: int | None = None) -> float:
        """FLOPs of forward and backward for one token in a sequence of `context` tokens (None: the model's own).

        6 N + 12 * layers * heads * head_dim * context / 2 (Chowdhery et al. 2022, appendix B; halved since half of the
        scores are masked). N is the parameters that multiply a token: all but the position table and an untied input
        embedding, which are looked up. Document masks, padding and recomputation are not considered.
        """
        config = self.config
        multiplied = self.parameter_count()
        if self.position_embedding is not None:
            multiplied -= self.position_embedding.weight.numel()
        if self.head is not None:
            multiplied -= self.token_embedding.weight.numel()
        length = config.context if context is None else context
        return 6.0 * multiplied + 12.0 * config.layers * config.heads * config.head_dim * length / 2


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple
