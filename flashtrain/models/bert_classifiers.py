"""Classification heads on BERT's encoder, for sequences and for tokens.

Shapes: B batch, S sequence, T packed tokens, N sequences (B where padded), L labels, E embedding width.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.errors import at_least, one_of
from flashtrain.models.bert import IGNORED, Pooler, first_tokens
from flashtrain.models.bert_encoder import BertEncoder
from flashtrain.models.block import INITIAL_STD
from flashtrain.settings import options

POOLINGS = get_args(options.Pooling)


def mean_of_tokens(hidden: Tensor, lengths: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """The mean state (N, E) of each sequence's real tokens; 0 for an empty sequence.

    hidden (B, S, E), with lengths (B,) where rows are padded; or (T, E) with cu_seqlens (N + 1,).
    """
    precise = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if cu_seqlens is None:
        if lengths is None:
            return precise.mean(1).to(hidden.dtype)
        real = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]
        total, count = (precise * real[..., None]).sum(1), lengths
    else:
        count = cu_seqlens.diff()
        of = _sequence_of(hidden, cu_seqlens)
        total = precise.new_zeros(len(count) + 1, hidden.shape[1]).index_add(0, of, precise)[:-1]
    return (total / count.clamp(min=1)[:, None]).to(hidden.dtype)


def max_of_tokens(hidden: Tensor, lengths: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """The maximum (N, E) of each component over a sequence's real tokens; arguments as mean_of_tokens.

    The gradient goes to the first of equal maxima.
    """
    # amax's gradient goes to all elements equal to the result. Under torch.compile that can be none: the backward may
    # compare states that were rounded differently.
    if cu_seqlens is not None:
        return _LARGEST(hidden, cu_seqlens)[0]
    if lengths is None:
        return hidden.max(1).values
    real = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]
    return hidden.masked_fill(~real[..., None], -torch.inf).max(1).values.masked_fill((lengths == 0)[:, None], 0)


def _sequence_of(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The index (T,) of each token's sequence; tokens past the last end get one more, which callers drop."""
    index = torch.arange(hidden.shape[0], device=hidden.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), index, right=True)


# This is an operator so that its comparison sees the same rounded states whatever is compiled around it.
torch.library.define(
    "flashtrain::largest_of_sequences",
    "(Tensor hidden, Tensor cu_seqlens) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LARGEST = torch.ops.flashtrain.largest_of_sequences.default


@torch.library.impl("flashtrain::largest_of_sequences", ("cpu", "cuda"))
def _largest(hidden: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The maxima (N, E) and the tokens that have them, int64 (N, E); T for an empty sequence."""
    tokens, embed = hidden.shape
    of = _sequence_of(hidden, cu_seqlens)[:, None].expand_as(hidden)
    values = hidden.new_zeros(len(cu_seqlens), embed).scatter_reduce(0, of, hidden, "amax", include_self=False)
    index = torch.arange(tokens, device=hidden.device, dtype=torch.int32)[:, None]
    candidates = torch.where((hidden == values.gather(0, of)) | hidden.isnan(), index, tokens)
    places = candidates.new_full((len(cu_seqlens), embed), tokens).scatter_reduce(0, of, candidates, "amin")
    return values[:-1].contiguous(), places[:-1].long()


@torch.library.register_fake("flashtrain::largest_of_sequences")
def _largest_shapes(hidden: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    shape = (cu_seqlens.shape[0] - 1, hidden.shape[1])
    return hidden.new_empty(shape), hidden.new_empty(shape, dtype=torch.int64)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.tokens = inputs[0].shape[0]


def _spread(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    """Scatter the gradients to the maxima; those of empty sequences go to an extra row, which is dropped."""
    (places,) = ctx.saved_tensors
    return gradient.new_zeros(ctx.tokens + 1, gradient.shape[1]).scatter(0, places, gradient)[:-1], None


torch.library.register_autograd("flashtrain::largest_of_sequences", _spread, setup_context=_save)


class SequenceClassifier(nn.Module):
    """One class per sequence, or any number of them (multi_label), from the encoder's pooled states.

    Args:
        encoder: Module with BertEncoder's forward and config.
        labels: Number of labels L, at least 2 (1 with multi_label).
        pooling: "first" (the first token's state through a pooler, Devlin et al. 2019), "mean" or "max" over the
            real tokens.
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
        self.pooler = (pooler or _start(Pooler(config.embed, config.bias))) if pooling == "first" else None
        self.dropout = nn.Dropout(dropout)
        self.classifier = _start(nn.Linear(config.embed, labels))

    def forward(self, tokens: Tensor, **layout: Any) -> Tensor:
        """Logits (N, L) of tokens (B, S) or (T,); layout: the encoder's segments, lengths, cu_seqlens, positions."""
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

        A class of -100, or a row that contains -100, is ignored.
        """
        logits = self(tokens, **layout)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if not self.multi_label:
            return _mean_cross_entropy(logits, labels)
        counted = (labels != IGNORED).all(-1, keepdim=True)
        each = F.binary_cross_entropy_with_logits(logits, labels.where(counted, 0).to(logits.dtype), reduction="none")
        return each.where(counted, 0).sum() / (counted.sum() * logits.shape[-1]).clamp(min=1)


class TokenClassifier(nn.Module):
    """One class per token: encoder, dropout, linear layer; UserError for fewer than two labels."""

    def __init__(self, encoder: BertEncoder, labels: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        at_least("labels", labels, 2)
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout)
        self.classifier = _start(nn.Linear(encoder.config.embed, labels))

    def forward(self, tokens: Tensor, **layout: Any) -> Tensor:
        """Logits (B, S, L) or (T, L); layout as SequenceClassifier's."""
        return self.classifier(self.dropout(self.encoder(tokens, **layout)))

    def loss(self, tokens: Tensor, labels: Tensor, **layout: Any) -> Tensor:
        """The mean cross-entropy in nats, float32, over the labels (int64, shaped as tokens) that are not -100."""
        logits = self(tokens, **layout)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return _mean_cross_entropy(logits.flatten(0, -2), labels.flatten())


def _mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the labels that are not -100; 0 where there are none, for which torch gives NaN."""
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


def _start(module: Any) -> Any:
    """BERT's initialization for a new head alone: the encoder may be trained already."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=INITIAL_STD)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return module
