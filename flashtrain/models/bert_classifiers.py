"""Heads on an encoder that is fine-tuned: labels of whole sequences, one or several each, and labels of tokens.

B batch, S sequence, T packed tokens, N sequences (B of padded ones), L labels, E embedding width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.errors import UserError, unknown
from flashtrain.models.bert import first_tokens
from flashtrain.models.bert_encoder import INITIAL_STD, BertEncoder
from flashtrain.models.bert_heads import IGNORED, Pooler
from flashtrain.models.token_pooling import max_of_tokens, mean_of_tokens

POOLINGS = ("first", "mean", "max")


class SequenceClassifier(nn.Module):
    """One class a sequence, or any number of them (multi_label), from the encoder's pooled states.

    encoder: takes tokens and their layout as BertEncoder does, and has a config. labels: L.
    pooling: "first" puts the first token's state through a pooler (Devlin et al. 2019), "mean" averages over all real
    tokens, "max" takes the largest of each component over them. pooler: a trained one (Bert.pooler); None: a new one.
    dropout: before the classifier.
    UserError: fewer than one label (two unless multi_label), an unknown pooling.
    """

    def __init__(
        self,
        encoder: BertEncoder,
        labels: int,
        *,
        multi_label: bool = False,
        pooling: str = "first",
        pooler: Pooler | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        least = 1 if multi_label else 2
        if labels < least:
            raise UserError(f"{labels} labels for a classifier. Possible: {least} or more.")
        if pooling not in POOLINGS:
            raise unknown("pooling", pooling, POOLINGS)
        config = encoder.config
        self.encoder = encoder
        self.multi_label = multi_label
        self.pooling = pooling
        self.pooler = (pooler or _start(Pooler(config.embed, config.bias))) if pooling == "first" else None
        self.dropout = nn.Dropout(dropout)
        self.classifier = _start(nn.Linear(config.embed, labels))

    def forward(self, tokens: Tensor, **layout: Any) -> Tensor:
        """Logits (N, L) of tokens (B, S) or (T,); layout: segments, lengths, cu_seqlens, positions of the encoder."""
        hidden = self.encoder(tokens, **layout)
        cu_seqlens = layout.get("cu_seqlens")
        if self.pooler is not None:
            pooled = self.pooler(first_tokens(hidden, cu_seqlens))
        else:
            pool = mean_of_tokens if self.pooling == "mean" else max_of_tokens
            pooled = pool(hidden, layout.get("lengths"), cu_seqlens)
        return self.classifier(self.dropout(pooled))

    def loss(self, tokens: Tensor, labels: Tensor, **layout: Any) -> Tensor:
        """The mean cross-entropy in nats, float32. labels: (N,) int64 classes, or (N, L) of 0 and 1 with multi_label.

        A class of -100, or a row with a -100 in it, counts nothing.
        """
        logits = self(tokens, **layout)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if not self.multi_label:
            return _mean_cross_entropy(logits, labels)
        counted = (labels != IGNORED).all(-1, keepdim=True)
        each = F.binary_cross_entropy_with_logits(logits, labels.where(counted, 0).to(logits.dtype), reduction="none")
        return each.where(counted, 0).sum() / (counted.sum() * logits.shape[-1]).clamp(min=1)


class TokenClassifier(nn.Module):
    """One class a token: encoder, dropout, a linear layer. UserError: fewer than two labels."""

    def __init__(self, encoder: BertEncoder, labels: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        if labels < 2:
            raise UserError(f"{labels} labels for a classifier. Possible: 2 or more.")
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout)
        self.classifier = _start(nn.Linear(encoder.config.embed, labels))

    def forward(self, tokens: Tensor, **layout: Any) -> Tensor:
        """Logits (B, S, L) or (T, L), as tokens; layout as SequenceClassifier's."""
        return self.classifier(self.dropout(self.encoder(tokens, **layout)))

    def loss(self, tokens: Tensor, labels: Tensor, **layout: Any) -> Tensor:
        """The mean cross-entropy in nats, float32, over the labels (as tokens, int64) that are not -100."""
        logits = self(tokens, **layout)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return _mean_cross_entropy(logits.flatten(0, -2), labels.flatten())


def _mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """0 where there is no label at all, for which torch gives NaN."""
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


def _start(module: Any) -> Any:
    """BERT's start, of a new head alone: the encoder may be trained already."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=INITIAL_STD)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return module
