"""A plain Transformer encoder that classifies sequences of tokens or single pixels: no
convolution, no patches.

    config = ClassifierConfig(classes=2, length=128 * 128, side=128)
    model = Classifier(config, attention="flash")
    logits = model(pixels)                # pixels (B, S) uint8 in raster order; logits (B, classes)

Shapes: B batch, S sequence, E embedding width, M masked tokens per row, C rows with masked tokens.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.models.activation_checkpointing import MemorySavings
from flashtrain.models.attention_functions import AnyMask, padding_mask, plan_mask
from flashtrain.models.block import make_blocks, norm_of
from flashtrain.models.block_pattern import DENSE, BlockPattern
from flashtrain.models.classifier_config import GREY_LEVELS, ClassifierConfig
from flashtrain.models.positions import AxialRotaryPositions, LearnedPositions, RotaryPositions
from flashtrain.models.sequence_pooling import AttentionPooling, max_of_tokens, mean_of_tokens
from flashtrain_kernels import linear_cross_entropy
from flashtrain_kernels.loss_head import IGNORED

INITIAL_STD = 0.1  # of embeddings


class Losses(NamedTuple):
    """Scalars of a classifier's batch: the loss of labels, the loss of masked pixels, and the share
    of rows whose label is predicted correctly."""

    classification: Tensor  # mean cross-entropy of the labels, in nats
    pixels: Tensor  # mean cross-entropy of the masked pixels, in nats; 0 where none are masked
    correct: Tensor  # share of rows whose largest logit is the label's


class GreyEmbedding(nn.Module):
    """The embedding of a grey level: its value, scaled to [-1, 1], times one
    learned vector, plus another."""

    def __init__(self, embed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(embed))
        self.bias = nn.Parameter(torch.empty(embed))

    def forward(self, levels: Tensor) -> Tensor:
        """Embed levels (B, S), integers 0..255, as (B, S, E), in the weights'
        dtype also under autocast."""
        value = (levels.to(self.weight.dtype) / (GREY_LEVELS - 1) - 0.5) / 0.5
        return value[..., None] * self.weight + self.bias


class Classifier(nn.Module):
    """A Transformer classifier: embedding and positions, pre-norm blocks (not
    causal), norm, pooling, head.

    The head has one hidden layer of width E with GELU. The model runs under
    torch.compile(fullgraph=True).

    Args:
        attention: "flash", "sdpa" or "standard"; it changes speed and memory, not the
            result or the weights.

    Raises:
        UserError: An unknown attention.
    """

    def __init__(self, config: ClassifierConfig, attention: str = "flash") -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        embed = config.embed
        grey = config.inputs == "grey"
        self.embedding = GreyEmbedding(embed) if grey else nn.Embedding(config.vocab_size, embed)
        learned = config.positions == "learned"
        self.position_embedding = LearnedPositions(config.length, embed) if learned else None
        self.mask_embedding = nn.Parameter(torch.empty(embed)) if config.grey_bins else None
        self.dropout = nn.Dropout(config.dropout)
        rotary = partial(_rotary, config)
        self.blocks = make_blocks(
            config, config.layer_specs, causal=False, attention=attention, rotary=rotary
        )
        self.final_norm = norm_of(config)
        self.pooling = AttentionPooling(embed) if config.pooling == "attention" else None
        self.head = nn.Sequential(
            nn.Linear(embed if config.towers == 1 else 4 * embed, embed),
            nn.GELU(),
            nn.Linear(embed, config.classes),
        )
        self.pixel_head = (
            nn.Linear(embed, config.grey_bins, bias=False) if config.grey_bins else None
        )
        self.pattern = None
        if config.pattern != DENSE:
            self.pattern = BlockPattern(
                config.pattern,
                config.length,
                block=config.pattern_block,
                local=config.pattern_local,
                globals=config.pattern_globals,
                side=config.side,
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize embeddings normally, layers as torch does, and scale the layers that write
        into the residual stream by 1/sqrt(2 layers) (Radford et al. 2019)."""
        places = [] if self.position_embedding is None else [self.position_embedding.weight]
        for parameter in (*self.embedding.parameters(), self.mask_embedding, *places):
            if parameter is not None:
                nn.init.normal_(parameter, std=INITIAL_STD)
        with torch.no_grad():
            for block in self.blocks:
                for projection in block.residual_projections():  # type: ignore[operator]
                    projection.weight.mul_((2 * self.config.layers) ** -0.5)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Compute logits (B, classes) for tokens (B, S), or (B, 2, S) with two
        towers, of any integer dtype.

        Args:
            lengths: (B,) or (B, 2), the number of tokens of each row before its padding, at least
                1 (None: no padding).

        Raises:
            UserError: Rows have padding under a block pattern.
        """
        rows, row_lengths = _rows(tokens, lengths)
        return self.logits(self.hidden(rows, row_lengths), row_lengths)

    def hidden(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        masked: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Compute the states (B, S, E) after the last norm.

        Args:
            tokens: Tokens or grey levels, (B, S).
            lengths: (B,) numbers of real tokens in padded rows (None: no padding).
            masked: (B, S) bool, True at tokens or pixels that are hidden from the
                model (None: none are).
            positions: (B, S) int64, the pixels' raster numbers where only some are given
                (None: all, in order).
        """
        mask = self._mask(tokens, lengths)
        order, places = (
            (None, None) if self.pattern is None else (self.pattern.order, self.pattern.places)
        )
        if positions is None:
            positions = (
                torch.arange(tokens.shape[1], device=tokens.device)[None]
                if order is None
                else order[None]
            )
        if order is not None:  # tiles reorder the tokens; each keeps its own position
            tokens = tokens[:, order]
            masked = None if masked is None else masked[:, order]
        x = self.embedding(tokens if self.config.inputs == "grey" else tokens.int())
        if masked is not None and self.mask_embedding is not None:
            x = torch.where(masked[..., None], self.mask_embedding, x)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        x = self.dropout(x)
        dropout = self.config.dropout if self.training else 0.0
        mask = plan_mask(
            mask, x, attention=self.attention, head_dim=self.config.head_dim, dropout=dropout
        )
        for block in self.blocks:
            x = block(x, positions=positions, mask=mask)
        x = self.final_norm(x)
        return x if places is None else x[:, places]

    def logits(self, hidden: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Compute logits (B, classes) from hidden (B, S, E); with two towers hidden has
        2B rows, two per sample."""
        pool = self.pooling or (mean_of_tokens if self.config.pooling == "mean" else max_of_tokens)
        pooled = pool(hidden, lengths)
        if self.config.towers == 2:
            first, second = pooled.unflatten(0, (-1, 2)).unbind(dim=1)
            pooled = torch.cat((first, second, first * second, first - second), dim=-1)
        return self.head(pooled)

    def losses(
        self,
        tokens: Tensor,
        labels: Tensor,
        lengths: Tensor | None = None,
        masked: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        copies: bool = True,
    ) -> Losses:
        """Compute the losses of a batch, in at least float32; tokens and lengths as in
        forward, labels (B,) int64.

        Args:
            masked: (C, M) int64, C at most B: indices of the tokens or pixels of the first C rows
                that are hidden and predicted from the others (Devlin et al. 2019; Amos et al. 2023,
                arXiv 2310.02980), -1 for none.
            positions: As in `hidden`; only without masked.
            copies: Whether masked rows are read in addition to the unmasked batch, from
                which labels are then predicted. Otherwise labels are predicted from the
                masked rows, and C = B.
        """
        rows, row_lengths = _rows(tokens, lengths)
        if masked is None:
            hidden = self.hidden(rows, row_lengths, positions=positions)
            pixels = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        else:
            (count, _), (batch, length) = masked.shape, rows.shape
            hides = torch.zeros((count, length + 1), dtype=torch.bool, device=rows.device)
            hides = hides.scatter(1, torch.where(masked < 0, length, masked), True)[:, :length]
            if copies:
                whole = torch.zeros((batch, length), dtype=torch.bool, device=rows.device)
                twice = (
                    None if row_lengths is None else torch.cat((row_lengths, row_lengths[:count]))
                )
                both = self.hidden(
                    torch.cat((rows, rows[:count])), twice, torch.cat((whole, hides))
                )
                hidden, reread = both[:batch], both[batch:]
            else:
                hidden = reread = self.hidden(rows, row_lengths, hides)
            pixels = self.pixel_loss(reread, rows[:count], masked)
        logits = self.logits(hidden, row_lengths)
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        classification = F.cross_entropy(precise, labels)
        correct = (logits.argmax(dim=-1) == labels).to(precise.dtype).mean()
        return Losses(classification, pixels, correct)

    def pixel_loss(self, hidden: Tensor, levels: Tensor, masked: Tensor) -> Tensor:
        """Compute the mean cross-entropy in nats of the masked tokens, or of the
        masked grey levels' bins.

        Args:
            hidden: The states after the last norm, (C, S, E).
            levels: Grey levels or tokens, (C, S).
            masked: (C, M) int64, the indices of each row's masked tokens or pixels, -1 for none.
        """
        places = masked.clamp(min=0)
        states = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        labels = levels.gather(1, places).long()
        if self.config.inputs != "tokens":
            labels = labels * self.config.grey_bins // GREY_LEVELS
        head = cast(nn.Linear, self.pixel_head)
        return linear_cross_entropy(states, head.weight, torch.where(masked < 0, IGNORED, labels))

    def save_memory(self, savings: MemorySavings) -> None:
        """Use these memory options (activation checkpointing, offloading, chunks) from now on."""
        for block in self.blocks:
            block.save_memory(savings)  # type: ignore[operator]

    def parameter_count(self) -> int:
        """The number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_sample(self, length: int | None = None) -> float:
        """Return the FLOPs of forward and backward for one sample of `length` tokens
        (None: config.length).

        For each tower: 6 N S + 12 layers heads head_dim S^2 times the pattern's density (Chowdhery
        et al. 2022, appendix B, not halved, since nothing is causal), with N parameters in the
        blocks. Embeddings, pooling and a second reading with masked pixels are not counted.
        """
        config = self.config
        tokens = config.length if length is None else length
        multiplied = sum(parameter.numel() for parameter in self.blocks.parameters())
        density = 1.0 if self.pattern is None else self.pattern.density
        attention = 12.0 * config.layers * config.embed * tokens * tokens * density
        return config.towers * (6.0 * multiplied * tokens + attention)

    def _mask(self, tokens: Tensor, lengths: Tensor | None) -> AnyMask | None:
        if self.pattern is None:
            return None if lengths is None else padding_mask(tokens.shape[1], lengths)
        if lengths is not None:
            raise UserError("block-sparse patterns do not support padded rows. Use pattern=dense.")
        return self.pattern()


def _rotary(config: ClassifierConfig, head_dim: int) -> nn.Module:
    if config.positions == "axial":
        return AxialRotaryPositions(head_dim, math.isqrt(config.length), config.angle_base)
    return RotaryPositions(head_dim, config.angle_base)


def _rows(tokens: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return tokens (rows, S) and lengths (rows,); of samples of two sequences, (B, 2, S), each
    sequence becomes a row, and a sample two consecutive rows."""
    if tokens.dim() == 2:
        return tokens, lengths
    return tokens.flatten(0, 1), None if lengths is None else lengths.flatten()
