"""Classification heads on BERT's encoder, for sequences and for tokens.

Shapes: B batch, S sequence, T packed tokens, N sequences (B where padded), L labels.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.errors import at_least, one_of
from flashtrain.models.bert import Pooler, first_tokens
from flashtrain.models.bert_encoder import BertEncoder
from flashtrain.models.block import start_normal
from flashtrain.models.sequence_pooling import EfficientProbing, max_of_tokens, mean_of_tokens
from flashtrain.settings import options
from flashtrain_kernels.loss_head import IGNORED

POOLINGS = get_args(options.Pooling)


class SequenceClassifier(nn.Module):
    """A classifier that assigns each sequence one label, or any number of labels
    (multi_label), on BERT's encoder.

    Args:
        encoder: Module with BertEncoder's forward and config.
        labels: Number of labels L, at least 2 (1 with multi_label).
        pooling: "first" (the first token's state through a pooler, Devlin et al. 2019), "mean" or
            "max" over the real tokens, or "probe" (EfficientProbing).
        queries: Number of queries of pooling "probe".
        pooler: Trained pooler, such as Bert.pooler (None: a new one).
        dropout: Probability of dropping a pooled value before the classifier.

    Raises:
        UserError: Too few labels, or an unknown pooling.
    """

    def __init__(
        self,
        encoder: BertEncoder,
        labels: int,
        *,
        multi_label: bool = False,
        pooling: str = "first",
        queries: int = 32,
        pooler: Pooler | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        at_least("labels", labels, 1 if multi_label else 2)
        one_of("pooling", pooling, POOLINGS)
        config = encoder.config
        self.encoder = encoder
        self.multi_label = multi_label
        self.pooling = pooling
        # The encoder may be trained already: only new heads start with BERT's initialization.
        self.pooler = (
            (pooler or start_normal(Pooler(config.embed, config.bias)))
            if pooling == "first"
            else None
        )
        probes = pooling == "probe"
        self.probe = start_normal(EfficientProbing(config.embed, queries)) if probes else None
        self.dropout = nn.Dropout(dropout)
        self.classifier = start_normal(nn.Linear(config.embed, labels))

    def forward(self, tokens: Tensor, **given: Any) -> Tensor:
        """Compute logits (N, L) for tokens (B, S) or (T,); given: further arguments
        of BertEncoder.forward."""
        hidden = self.encoder(tokens, **given)
        cu_seqlens = given.get("cu_seqlens")
        if self.pooler is not None:
            pooled = self.pooler(first_tokens(hidden, cu_seqlens))
        else:
            pool = self.probe or (mean_of_tokens if self.pooling == "mean" else max_of_tokens)
            pooled = pool(hidden, given.get("lengths"), cu_seqlens)
        return self.classifier(self.dropout(pooled))

    def loss(self, tokens: Tensor, labels: Tensor, **given: Any) -> Tensor:
        """Compute the mean cross-entropy in nats, a float32 scalar.

        Args:
            tokens: (B, S) or (T,).
            labels: Classes (N,) int64, or (N, L) of 0 and 1 with multi_label. A class of -100, or a
                row that contains -100, is ignored.
            given: Further arguments of BertEncoder.forward (segments, lengths,
                cu_seqlens, positions).
        """
        logits = self(tokens, **given)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if not self.multi_label:
            return _mean_cross_entropy(logits, labels)
        counted = (labels != IGNORED).all(-1, keepdim=True)
        each = F.binary_cross_entropy_with_logits(
            logits, labels.where(counted, 0).to(logits.dtype), reduction="none"
        )
        return each.where(counted, 0).sum() / (counted.sum() * logits.shape[-1]).clamp(min=1)


class TokenClassifier(nn.Module):
    """A classifier that assigns each token one label: BERT's encoder, dropout, linear
    layer. It needs at least two labels."""

    def __init__(self, encoder: BertEncoder, labels: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        at_least("labels", labels, 2)
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout)
        self.classifier = start_normal(nn.Linear(encoder.config.embed, labels))

    def forward(self, tokens: Tensor, **given: Any) -> Tensor:
        """Compute logits (B, S, L) or (T, L); given: further arguments of BertEncoder.forward."""
        return self.classifier(self.dropout(self.encoder(tokens, **given)))

    def loss(self, tokens: Tensor, labels: Tensor, **given: Any) -> Tensor:
        """Compute the mean cross-entropy in nats, float32, over labels (int64, shaped as
        tokens) that are not -100."""
        logits = self(tokens, **given)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return _mean_cross_entropy(logits.flatten(0, -2), labels.flatten())


def _mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the labels that are not -100; 0 if all are -100, where torch gives
    NaN."""
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)
