"""BERT's encoder, on padded batches or on sequences packed into one row.

Shapes: B batch, S sequence, T packed tokens, N packed sequences, E embedding width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError, one_of
from flashtrain.models.attention import AnyMask, check_heads, plan_mask
from flashtrain.models.block import FEED_FORWARDS, GATED, Block, PostNormBlock, check_shape, normalization, start_normal
from flashtrain.models.cache import PackedSequences
from flashtrain.models.memory_savings import MemorySavings
from flashtrain.models.positions import LearnedPositions, RotaryPositions, check_learned, check_rotary
from flashtrain.settings import options
from flashtrain_kernels import Documents, Mask, dispatch, documents_from_cu_seqlens, masks
from flashtrain_kernels.environment import autocast_dtype

FAMILIES = get_args(options.BertFamily)
POSITIONS = get_args(options.Positions)
NORM_PLACES = ("post", "pre")
BERT_EPSILON = 1e-12


class BertSize(NamedTuple):
    """A row of the size table."""

    layers: int
    heads: int
    embed: int


BERT_SIZES = {
    "tiny": BertSize(layers=2, heads=2, embed=128),  # the smallest of Turc et al. 2019 (arXiv 1908.08962)
    "base": BertSize(layers=12, heads=12, embed=768),
    "large": BertSize(layers=24, heads=16, embed=1024),
}


@dataclass(frozen=True)
class BertConfig:
    """The shape of an encoder and its heads; with the weights it is enough to rebuild them.

    Args:
        vocab_size: Tokens, special ones included.
        vocab_rows: Rows of the embedding table, at least vocab_size; further rows are never predicted.
        context: Longest sequence in tokens, a limit with learned positions only.
        ffn: Width inside the feed-forward.
        segments: Segment embeddings (0: none).
        norm_place: "post" or "pre".
        activation: A name in block.FEED_FORWARDS.
        dropout: Probability, for embeddings, attention weights and both branches of a block.
        epsilon: Of every LayerNorm.
        masked_head: Whether there is a head that predicts masked tokens.
        pooler: Whether the first token's state passes a layer with tanh.
        next_sentence: Whether a head on the pooler predicts if the second segment followed the first.

    Raises:
        UserError: Sizes that do not fit together, or an unknown name.
    """

    vocab_size: int
    vocab_rows: int
    context: int
    layers: int
    heads: int
    embed: int
    ffn: int
    segments: int = 2
    positions: str = "learned"
    norm_place: str = "post"
    activation: str = "gelu"
    bias: bool = True
    dropout: float = 0.0
    epsilon: float = BERT_EPSILON
    rope_base: float = 10000.0
    masked_head: bool = True
    pooler: bool = False
    next_sentence: bool = False

    def __post_init__(self) -> None:
        names = {"positions": POSITIONS, "norm_place": NORM_PLACES, "activation": FEED_FORWARDS}
        check_shape(self, ("vocab_size", "context", "layers", "ffn"), names)
        head_dim = check_heads(self.embed, self.heads, self.heads)
        if self.positions == "rotary":
            check_rotary(head_dim, self.rope_base)
        if self.next_sentence and not (self.pooler and self.segments > 1):
            raise UserError("next_sentence needs a pooler and two segments. Set pooler=True and segments=2.")

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    @classmethod
    def of_size(
        cls,
        size: str,
        family: str = "bert",
        *,
        vocab_size: int,
        context: int = 512,
        vocab_rows: int | None = None,
        dropout: float = 0.0,
        next_sentence: bool = False,
        activation: str | None = None,
    ) -> BertConfig:
        """The configuration of a named size.

        Args:
            size: A name in BERT_SIZES.
            family: "bert", or "modern" (pre-norm, rotary, GeGLU, no biases, segments with next_sentence only).
            vocab_rows: Rows of the embedding table (None: vocab_size rounded up to a multiple of 64).
            activation: None: the family's; for "bert" GELU's tanh form ("gelu_exact" is transformers' BERT's).

        Raises:
            UserError: An unknown size or family.
        """
        one_of("model size", size, BERT_SIZES)
        one_of("model family", family, FAMILIES)
        layers, heads, embed = BERT_SIZES[size]
        modern = family == "modern"
        return cls(
            vocab_size=vocab_size,
            vocab_rows=-(-vocab_size // 64) * 64 if vocab_rows is None else vocab_rows,
            context=context,
            layers=layers,
            heads=heads,
            embed=embed,
            # GeGLU has three matrices for GELU's two: 8/3 E instead of 4 E keeps the parameters equal.
            ffn=math.ceil(embed * 8 / 3 / 128) * 128 if modern else 4 * embed,
            segments=2 if next_sentence or not modern else 0,
            positions="rotary" if modern else "learned",
            norm_place="pre" if modern else "post",
            activation=activation or ("geglu" if modern else "gelu"),
            bias=not modern,
            dropout=dropout,
            epsilon=1e-5 if modern else BERT_EPSILON,
            pooler=next_sentence,
            next_sentence=next_sentence,
        )

    def cost_per_token(self, masked_share: float = 0.0) -> float:
        """FLOPs of a token's forward and backward without attention's scores; masked_share: of tokens with a label.

        Six for each weight that multiplies it (Chowdhery et al. 2022, appendix B); embedding look-ups cost nothing.
        """
        width = self.embed
        ffn = (3 if self.activation in GATED else 2) * width * self.ffn
        head = masked_share * (width * width + width * self.vocab_size) if self.masked_head else 0.0
        return 6.0 * (self.layers * (4 * width * width + ffn) + head)

    def cost_per_pair(self) -> float:
        """FLOPs of one query's attention to one key in all layers: two products forward, four backward."""
        return 12.0 * self.layers * self.embed

    def flops(self, lengths: Sequence[int], masked: int = 0) -> float:
        """Model FLOPs of a batch's forward and backward, from the lengths of its sequences and its count of labels.

        Padding and recomputation are not counted.
        """
        return self.flops_of(sum(lengths), sum(length * length for length in lengths), len(lengths), masked)

    def flops_of(self, tokens: int, pairs: int, sequences: int, masked: int = 0) -> float:
        """`flops` from sums over the sequences: their lengths, the squares of these, their number, the labels."""
        heads = masked * (self.cost_per_token(1.0) - self.cost_per_token())
        if self.pooler:
            heads += 6.0 * sequences * self.embed * (self.embed + (2 if self.next_sentence else 0))
        return tokens * self.cost_per_token() + pairs * self.cost_per_pair() + heads


class BertEncoder(nn.Module):
    """Embeddings and blocks (Devlin et al. 2019), or their modern variant; every token sees its whole sequence.

    Args:
        attention: "flash", "sdpa" or "standard"; it changes speed and memory, not the result or the weights.
        residual: Dtype of the residual stream: "weights" (the weights' own) or "compute" (autocast's).

    Raises:
        UserError: An unknown attention or residual.
    """

    def __init__(self, config: BertConfig, attention: str = "flash", residual: str = "compute") -> None:
        super().__init__()
        one_of("residual", residual, ("weights", "compute"))
        self.config = config
        self.attention = attention
        self.residual = residual
        learned, post = config.positions == "learned", config.norm_place == "post"
        self.token_embedding = nn.Embedding(config.vocab_rows, config.embed)
        self.position_embedding = LearnedPositions(config.context, config.embed) if learned else None
        self.segment_embedding = nn.Embedding(config.segments, config.embed) if config.segments else None
        self.embedding_norm = self._norm() if post else None
        self.dropout = nn.Dropout(config.dropout)
        rotary = None if learned else RotaryPositions(config.head_dim, config.rope_base)
        self.blocks = nn.ModuleList(
            (PostNormBlock if post else Block)(
                config.embed,
                config.heads,
                ffn=config.ffn,
                activation=config.activation,
                bias=config.bias,
                dropout=config.dropout,
                causal=False,
                attention=attention,
                rotary=rotary,
                epsilon=config.epsilon,
            )
            for _ in range(config.layers)
        )
        self.final_norm = None if post else self._norm()
        start_normal(self)

    def _norm(self) -> nn.Module:
        return normalization("layernorm", self.config.embed, self.config.bias, self.config.epsilon)

    def save_memory(self, savings: MemorySavings) -> None:
        """Use these savings of activation memory from now on, at the cost of time."""
        for block in self.blocks:
            cast(Block, block).save_memory(savings)

    def compile_blocks(self, **options: Any) -> None:
        """Compile each block by torch.compile with these options."""
        for block in self.blocks:
            cast(Block, block).compile_inside(**options)

    def forward(
        self,
        tokens: Tensor,
        *,
        segments: Tensor | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The states (B, S, E) of padded tokens (B, S), or (T, E) of packed tokens (T,).

        Without our kernels, and outside torch.compile, packed lengths are read from the device (one synchronization).

        Args:
            tokens: Integers, (B, S) or (T,).
            segments: Shaped as tokens (None: all 0).
            lengths: (B,) lengths of padded rows (None: no padding).
            cu_seqlens: (N + 1,) int32 on the tokens' device, required for packed tokens: 0, then each sequence's end.
                Empty sequences at the end are ignored, so that N can be the same for all batches. Tokens past the last
                end see nothing and are not seen.
            positions: Shaped as tokens (None: counted from each sequence's first token).

        Raises:
            UserError: Positions past the context, or packed tokens without cu_seqlens.
        """
        packed = tokens.dim() == 1
        if packed != (cu_seqlens is not None) or (packed and lengths is not None):
            raise UserError(
                f"tokens of shape {tuple(tokens.shape)} {'with' if cu_seqlens is not None else 'without'} cu_seqlens: "
                "expected (B, S) with or without lengths, or (T,) with cu_seqlens alone."
            )
        if not packed and self.position_embedding is not None:
            check_learned(tokens.shape[1], self.config.context)
        rows = tokens[None] if packed else tokens
        dropout = self.config.dropout if self.training else 0.0
        mask: Mask | PackedSequences | None
        if cu_seqlens is not None:
            mask, counted = self._packed(cu_seqlens, tokens, dropout > 0)
        else:
            mask, counted = _padded(lengths, tokens)
        if positions is not None:
            counted = positions[None] if packed else positions
        x = self._embed(rows, segments[None] if packed and segments is not None else segments, counted, packed)
        planned: AnyMask | PackedSequences | None = mask
        if isinstance(mask, Mask):
            planned = plan_mask(mask, x, attention=self.attention, head_dim=self.config.head_dim, dropout=dropout)
        for block in self.blocks:
            x = block(x, positions=counted, mask=planned)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x[0] if packed else x

    def _embed(self, tokens: Tensor, segments: Tensor | None, positions: Tensor, packed: bool) -> Tensor:
        """(B, S) -> (B, S, E)."""
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions, packed=packed)
        if self.segment_embedding is not None:
            # The backward of one row for all tokens is a sum, not a scatter of every token into two rows.
            x = x + (self.segment_embedding.weight[0] if segments is None else self.segment_embedding(segments))
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = self.dropout(x)
        if self.residual == "compute" and x.dtype != torch.float64:
            x = x.to(autocast_dtype(x.device.type) or x.dtype)
        return x

    def _packed(self, cu_seqlens: Tensor, tokens: Tensor, drops: bool) -> tuple[Mask | PackedSequences, Tensor]:
        """The mask that separates the sequences of a packed row, and each token's position in its own, (1, T) int32."""
        documents = documents_from_cu_seqlens(cu_seqlens, tokens.shape[0])
        index = torch.arange(tokens.shape[0], device=tokens.device, dtype=torch.int32)[None]
        positions = torch.where(documents.end > documents.start, index - documents.start, 0)
        kernels = self.attention == "flash" and dispatch.implementation_for(tokens.device.type) != "torch"
        if kernels or torch.compiler.is_compiling() or tokens.is_meta:
            if drops:  # the Hopper kernels support dropout with varlen masks only
                return masks.varlen(cu_seqlens, cu_seqlens, tokens.shape[0], tokens.shape[0]), positions
            return masks.document(documents, causal=False), positions
        return PackedSequences(tuple(cu_seqlens.diff().tolist())), positions


def _padded(lengths: Tensor | None, tokens: Tensor) -> tuple[Mask | None, Tensor]:
    """The mask of padded rows, None where all are full, and positions (1, S) int32."""
    index = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.int32)[None]
    if lengths is None:
        return None, index
    end = torch.where(index < lengths[:, None], lengths[:, None], 0).to(torch.int32)
    return masks.document(Documents(torch.zeros_like(end), end), causal=False), index
