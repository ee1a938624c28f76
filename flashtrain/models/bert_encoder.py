"""BERT's encoder, on padded batches or on sequences packed into one row.

Shapes: B batch, S sequence, T packed tokens, N packed sequences, E embedding width.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from flashtrain.models.attention_functions import AnyMask, PackedSequences, padding_mask, plan_mask
from flashtrain.models.bert_config import BertConfig
from flashtrain.models.block import make_blocks, norm_of, start_normal
from flashtrain.models.positions import LearnedPositions, RotaryPositions
from flashtrain_kernels import Mask, dispatch, documents_from_cu_seqlens, masks
from flashtrain_kernels.environment import autocast_dtype


class BertEncoder(nn.Module):
    """BERT's encoder (Devlin et al. 2019) or its modern variant; every token sees all
    tokens of its sequence.

    Args:
        attention: "flash", "sdpa" or "standard"; it changes speed and memory, not the
            result or the weights.

    Raises:
        UserError: An unknown attention.
    """

    def __init__(self, config: BertConfig, attention: str = "flash") -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        learned, post = config.positions == "learned", config.norm_place == "post"
        self.token_embedding = nn.Embedding(config.vocab_rows, config.embed)
        self.position_embedding = (
            LearnedPositions(config.context, config.embed) if learned else None
        )
        self.segment_embedding = (
            nn.Embedding(config.segments, config.embed) if config.segments else None
        )
        self.embedding_norm = norm_of(config) if post else None
        self.dropout = nn.Dropout(config.dropout)
        rotary = partial(RotaryPositions, base=config.rope_base)
        self.blocks = make_blocks(
            config, config.layer_specs, causal=False, attention=attention, rotary=rotary
        )
        self.final_norm = None if post else norm_of(config)
        start_normal(self)

    def forward(
        self,
        tokens: Tensor,
        *,
        segments: Tensor | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Compute the states (B, S, E) of padded tokens (B, S), or (T, E) of packed tokens (T,).

        Without our kernels, and outside torch.compile, packed lengths are read from the device
        (one synchronization).

        Args:
            tokens: Token ids, (B, S) or (T,).
            segments: Segment ids, shaped as tokens (None: all 0).
            lengths: (B,) numbers of real tokens in padded rows (None: no padding).
            cu_seqlens: (N + 1,) int32 on the tokens' device, required for packed tokens: 0, then
                each sequence's end. Empty sequences at the end are ignored, so that N can be the
                same for all batches. Tokens past the last end see no token and are seen by none.
            positions: Positions, shaped as tokens (None: counted from each sequence's first token).

        Raises:
            UserError: There are more positions than the context has.
        """
        packed = tokens.dim() == 1
        rows = tokens[None] if packed else tokens
        dropout = self.config.dropout if self.training else 0.0
        mask: Mask | PackedSequences | None
        if cu_seqlens is not None:
            mask, counted = self._packed(cu_seqlens, tokens, dropout > 0)
        else:
            mask = None if lengths is None else padding_mask(tokens.shape[1], lengths)
            counted = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.int32)[None]
        if positions is not None:
            counted = positions[None] if packed else positions
        x = self._embed(
            rows, segments[None] if packed and segments is not None else segments, counted, packed
        )
        planned: AnyMask | PackedSequences | None = mask
        if isinstance(mask, Mask):
            planned = plan_mask(
                mask, x, attention=self.attention, head_dim=self.config.head_dim, dropout=dropout
            )
        for block in self.blocks:
            x = block(x, positions=counted, mask=planned)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x[0] if packed else x

    def _embed(
        self, tokens: Tensor, segments: Tensor | None, positions: Tensor, packed: bool
    ) -> Tensor:
        """Compute the first block's input (B, S, E) from tokens (B, S): the sum of the embeddings
        after norm and dropout. packed: whether a row contains several sequences."""
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions, packed=packed)
        if self.segment_embedding is not None:
            # The backward of one row for all tokens is a sum, not a scatter of every
            # token into two rows.
            first = self.segment_embedding.weight[0]
            x = x + (first if segments is None else self.segment_embedding(segments))
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = self.dropout(x)
        if x.dtype == torch.float64:
            return x
        return x.to(autocast_dtype(x.device.type) or x.dtype)

    def _packed(
        self, cu_seqlens: Tensor, tokens: Tensor, drops: bool
    ) -> tuple[Mask | PackedSequences, Tensor]:
        """Return the mask that separates the sequences of a packed row, and each token's position
        in its sequence, (1, T) int32. drops: whether attention has dropout."""
        documents = documents_from_cu_seqlens(cu_seqlens, tokens.shape[0])
        index = torch.arange(tokens.shape[0], device=tokens.device, dtype=torch.int32)[None]
        positions = torch.where(documents.end > documents.start, index - documents.start, 0)
        kernels = (
            self.attention == "flash" and dispatch.implementation_for(tokens.device.type) != "torch"
        )
        if kernels or torch.compiler.is_compiling() or tokens.is_meta:
            if drops:  # the Hopper kernels support dropout with varlen masks only
                return masks.varlen(
                    cu_seqlens, cu_seqlens, tokens.shape[0], tokens.shape[0]
                ), positions
            return masks.document(documents, causal=False), positions
        return PackedSequences(tuple(cu_seqlens.diff().tolist())), positions
