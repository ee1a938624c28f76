"""BERT's encoder: tokens to states, on padded batches or on sequences packed into one row without padding.

B batch, S sequence, T packed tokens, N packed sequences, E embedding width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.models.attention_functions import AnyMask, plan_mask
from flashtrain.models.bert_config import BertConfig
from flashtrain.models.block import Block, PostNormBlock
from flashtrain.models.memory_savings import MemorySavings
from flashtrain.models.normalization import normalization
from flashtrain.models.packed_sequences import PackedSequences
from flashtrain.models.positions import LearnedPositions, RotaryPositions, check_learned
from flashtrain_kernels import Documents, Mask, dispatch, documents_from_cu_seqlens, masks

INITIAL_STD = 0.02


class BertEncoder(nn.Module):
    """Embeddings and blocks (Devlin et al. 2019), or their modern variant; every token sees its whole sequence.

    attention: "flash", "sdpa" or "standard"; it changes speed and memory, not the result or the weights.
    residual: "weights" keeps the sums between the blocks in the weights' type, "compute" in autocast's own.
    UserError: an unknown attention.
    """

    def __init__(self, config: BertConfig, attention: str = "flash", residual: str = "compute") -> None:
        super().__init__()
        if residual not in ("weights", "compute"):
            raise UserError(f"residual {residual!r}. Possible: weights or compute.")
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
        reset_bert_parameters(self)

    def _norm(self) -> nn.Module:
        return normalization("layernorm", self.config.embed, self.config.bias, self.config.epsilon)

    def save_memory(self, savings: MemorySavings) -> None:
        """Train with less memory for activations from now on, at the cost of time."""
        for block in self.blocks:
            cast(Block, block).save_memory(savings)

    def compile_blocks(self, **options: Any) -> None:
        """Each block through torch.compile with these options."""
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
        """The states (B, S, E) of padded tokens (B, S), or (T, E) of packed tokens (T,); all integers.

        lengths: (B,), of padded rows; None: none is padded. cu_seqlens: (N + 1,) int32 on the tokens' device, needed
        for packed tokens: 0, then where each sequence ends. Sequences of length 0 at the end are none, so that N can be
        the same for all batches; tokens past the last end see nothing, and nothing sees them.
        segments: as tokens (None: all 0). positions: as tokens (None: counted from each sequence's first token).

        Packed, nothing is computed for padding, and no score matrix is larger than a sequence's; without our kernels,
        and outside torch.compile, the lengths are read from the device, which waits for it once.
        UserError: positions past the context, packed tokens without cu_seqlens.
        """
        packed = tokens.dim() == 1
        if packed != (cu_seqlens is not None) or (packed and lengths is not None):
            raise UserError(
                f"tokens of shape {tuple(tokens.shape)} {'with' if cu_seqlens is not None else 'without'} cu_seqlens. "
                "Possible: (B, S) with or without lengths, or (T,) with cu_seqlens alone."
            )
        if not packed and self.position_embedding is not None:
            check_learned(tokens.shape[1], self.config.context)
        rows = tokens[None] if packed else tokens
        mask, counted = self._packed(cu_seqlens, tokens) if cu_seqlens is not None else _padded(lengths, tokens)
        if positions is not None:
            counted = positions[None] if packed else positions
        x = self._embed(rows, segments[None] if packed and segments is not None else segments, counted, packed)
        planned: AnyMask | PackedSequences | None = mask
        if isinstance(mask, Mask):
            dropout = self.config.dropout if self.training else 0.0
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
            # One row for all is a sum in the backward, and not a scatter of every token into two rows.
            x = x + (self.segment_embedding.weight[0] if segments is None else self.segment_embedding(segments))
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = self.dropout(x)
        if self.residual == "compute" and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return x

    def _packed(self, cu_seqlens: Tensor, tokens: Tensor) -> tuple[Mask | PackedSequences, Tensor]:
        """What keeps the sequences of a packed row apart, and where each token stands in its own, (1, T) int32."""
        documents = documents_from_cu_seqlens(cu_seqlens, tokens.shape[0])
        index = torch.arange(tokens.shape[0], device=tokens.device, dtype=torch.int32)[None]
        positions = torch.where(documents.end > documents.start, index - documents.start, 0)
        kernels = self.attention == "flash" and dispatch.implementation_for(tokens.device.type) != "torch"
        if kernels or torch.compiler.is_compiling():
            return masks.document(documents, causal=False), positions
        return PackedSequences(tuple(cu_seqlens.diff().tolist())), positions


def _padded(lengths: Tensor | None, tokens: Tensor) -> tuple[Mask | None, Tensor]:
    """The mask of padded rows, None where all are full, and positions (1, S) int32."""
    index = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.int32)[None]
    if lengths is None:
        return None, index
    end = torch.where(index < lengths[:, None], lengths[:, None], 0).to(torch.int32)
    return masks.document(Documents(torch.zeros_like(end), end), causal=False), index


def reset_bert_parameters(model: nn.Module) -> None:
    """BERT's start: weights normal(0, 0.02), biases 0, norms 1 and 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=INITIAL_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()
