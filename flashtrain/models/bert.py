"""BERT (Devlin et al. 2019) with its pre-training heads.

    config = BertConfig.of_size("large", vocab_size=30522)
    model = Bert(config, attention="flash")
    loss = model.loss(tokens, masked, labels, cu_seqlens=cu_seqlens)  # tokens (T,): end to end
    loss = model.loss(tokens, masked, labels, lengths=lengths)        # tokens (B, S): a row each

Shapes: B batch, S sequence, T packed tokens, N sequences (B where padded), M masked positions, E
embedding width, V rows of the embedding table.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.models.bert_config import BertConfig
from flashtrain.models.bert_encoder import BertEncoder
from flashtrain.models.block import norm_of, start_normal
from flashtrain.models.trainable import Trainable
from flashtrain_kernels import linear_cross_entropy
from flashtrain_kernels.loss_head import IGNORED

# Added to the matrix for the bias: 16 bytes in a 16-bit type, so that the product stays aligned.
BIAS_COLUMNS = 8
SCORED_CHUNK = 2048  # positions whose logits are stored at once


class MaskedLanguageHead(nn.Module):
    """The head that predicts the masked tokens (Devlin et al. 2019): dense, GELU, norm, decoder.

    The decoder's matrix is the token embedding table, an argument of the methods; its bias is a
    parameter of the head.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.approximate = "tanh" if config.activation == "gelu" else "none"
        self.dense = nn.Linear(config.embed, config.embed, bias=config.bias)
        self.norm = norm_of(config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_rows)) if config.bias else None

    def transform(self, hidden: Tensor) -> Tensor:
        """Compute the decoder's input (..., E) from the encoder's states hidden (..., E)."""
        return self.norm(F.gelu(self.dense(hidden), approximate=self.approximate))

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        """Compute logits (..., V), -inf past vocab_size, from hidden (..., E) and the token
        embedding table (V, E)."""
        logits = F.linear(self.transform(hidden), table, self.bias)
        if logits.shape[-1] > self.vocab_size:
            padding = torch.arange(logits.shape[-1], device=logits.device) >= self.vocab_size
            logits = logits.masked_fill(padding, -torch.inf)
        return logits

    def loss_sum(
        self, hidden: Tensor, table: Tensor, labels: Tensor, chunk: int | None = None
    ) -> Tensor:
        """Compute the sum of the cross-entropies in nats.

        Args:
            hidden: The encoder's states at the masked positions, (M, E).
            table: The token embedding table, (V, E).
            labels: (M,) int64, the original tokens; -100 is ignored.
            chunk: The number of positions whose logits are stored at once
                (None: chosen by the loss).

        Returns:
            A float32 scalar.
        """
        hidden = self.transform(hidden)
        if self.bias is not None:
            # The bias is a column of the matrix that meets a column of ones, so that logits are
            # never stored whole.
            ones = torch.cat((hidden.new_ones(1), hidden.new_zeros(BIAS_COLUMNS - 1)))
            hidden = torch.cat((hidden, ones.expand(hidden.shape[0], -1)), dim=1)
            table = torch.cat(
                (table, F.pad(self.bias[:, None], (0, BIAS_COLUMNS - 1)).to(table.dtype)), dim=1
            )
        return linear_cross_entropy(
            hidden, table, labels, vocab_size=self.vocab_size, chunk=chunk, reduction="sum"
        )

    @torch.no_grad()
    def correct(self, hidden: Tensor, table: Tensor, labels: Tensor) -> Tensor:
        """Count the labels (M,) that have the highest logit, as an int64 scalar;
        labels of -100 never count."""
        matches = [
            (self(part, table).argmax(-1) == label).sum()
            for part, label in zip(
                hidden.split(SCORED_CHUNK), labels.split(SCORED_CHUNK), strict=True
            )
        ]
        return torch.stack(matches).sum() if matches else labels.new_zeros(())


class Pooler(nn.Module):
    """BERT's pooler: tanh(dense(x)) for the states x (N, E) of the sequences' first tokens."""

    def __init__(self, embed: int, bias: bool = True) -> None:
        super().__init__()
        self.dense = nn.Linear(embed, embed, bias=bias)

    def forward(self, first: Tensor) -> Tensor:
        """Compute the pooled states (N, E) from the first tokens' states (N, E)."""
        return torch.tanh(self.dense(first))


class MaskedScore(NamedTuple):
    """A batch's sum of cross-entropies, number of correct predictions and number of
    labels, as scalar tensors."""

    loss_sum: Tensor  # of the cross-entropies, in nats
    correct: Tensor  # number of labels with the highest logit
    labels: Tensor  # number of labels


class Bert(Trainable):
    """BERT: the encoder with the heads that BertConfig selects; for attention see BertEncoder."""

    forward_methods = ("loss", "score")

    def __init__(self, config: BertConfig, attention: str = "flash") -> None:
        super().__init__()
        self.config = config
        self.encoder = BertEncoder(config, attention)
        self.masked_head = MaskedLanguageHead(config) if config.masked_head else None
        self.pooler = Pooler(config.embed, config.bias) if config.pooler else None
        self.next_sentence = (
            nn.Linear(config.embed, 2, bias=config.bias) if config.next_sentence else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as BERT does: weights normal(0, 0.02), biases 0."""
        start_normal(self)
        if self.masked_head is not None and self.masked_head.bias is not None:
            nn.init.zeros_(self.masked_head.bias)

    @property
    def can_generate(self) -> bool:
        return False  # a token sees those after it

    def forward(self, tokens: Tensor, **given: Any) -> Tensor:
        """Compute logits (B, S, V) or (T, V); given: further arguments of
        BertEncoder.forward, such as lengths."""
        return self._head()(self.encoder(tokens, **given), self.output_weight)

    @property
    def output_weight(self) -> Tensor:
        """The token embedding (V, E), which is also the masked head's matrix."""
        return self.encoder.token_embedding.weight

    def loss(  # type: ignore[override]  # only masked tokens have labels, and lengths or cu_seqlens describe rows
        self,
        tokens: Tensor,
        masked: Tensor,
        labels: Tensor,
        *,
        label_count: Tensor | None = None,
        **given: Any,
    ) -> Tensor:
        """Compute the mean cross-entropy in nats at the masked positions.

        The loss is a float32 scalar. torch.compile(model.loss, fullgraph=True) compiles
        once for equal T, N and M.

        Args:
            tokens: Padded (B, S) or packed (T,), some of them masked.
            masked: (M,) int64 indices into the flattened tokens.
            labels: (M,) int64, the original tokens; -100 is ignored, so that M can be the
                same for all batches.
            label_count: Scalar divisor in place of this batch's number of labels. Give all
                micro-batches of a step the mean number of labels, and the mean of their losses is
                the mean over the labels of the step.
            given: Further arguments of BertEncoder.forward, such as lengths.
        """
        head = self._head()
        hidden = self.encoder(tokens, **given)
        states = hidden.reshape(-1, hidden.shape[-1])
        total = head.loss_sum(
            states.index_select(0, masked), self.output_weight, labels, self.savings.loss_chunk
        )
        count = (labels != IGNORED).sum().clamp(min=1) if label_count is None else label_count
        return total / count.to(total.dtype)

    @torch.no_grad()
    def score(self, tokens: Tensor, masked: Tensor, labels: Tensor, **given: Any) -> MaskedScore:
        """Return a batch's MaskedScore; its sums, added up over all batches, give the exact loss
        and accuracy. Arguments as in loss."""
        head = self._head()
        hidden = self.encoder(tokens, **given)
        states = hidden.reshape(-1, hidden.shape[-1]).index_select(0, masked)
        return MaskedScore(
            head.loss_sum(states, self.output_weight, labels, self.savings.loss_chunk),
            head.correct(states, self.output_weight, labels),
            (labels != IGNORED).sum(),
        )

    def pooled(self, hidden: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Compute the pooler's output (N, E) from the encoder's states (B, S, E), or
        (T, E) with cu_seqlens."""
        return cast(Pooler, self.pooler)(first_tokens(hidden, cu_seqlens))

    def next_sentence_logits(self, hidden: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Compute next-sentence logits (N, 2) from the encoder's states (B, S, E), or
        (T, E) with cu_seqlens."""
        return cast(nn.Linear, self.next_sentence)(self.pooled(hidden, cu_seqlens))

    def _head(self) -> MaskedLanguageHead:
        return cast(MaskedLanguageHead, self.masked_head)

    def flops_per_token(self, context: int | None = None) -> float:
        """Return the FLOPs of one token's forward and backward in sequences of `context`
        tokens (None: config.context), with 15% of the tokens masked; BertConfig.flops is
        exact for a batch's real lengths."""
        length = self.config.context if context is None else context
        return self.config.cost_per_token(0.15) + self.config.cost_per_pair() * length


def first_tokens(hidden: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Select the state of each sequence's first token; an empty sequence gets the state of some
    other token (set its label to -100).

    Args:
        hidden: The encoder's states (B, S, E), or (T, E) of packed tokens.
        cu_seqlens: (N + 1,), 0 and each sequence's end, for packed tokens.

    Returns:
        The first tokens' states, (N, E).
    """
    if cu_seqlens is None:
        return hidden[:, 0]
    return hidden.index_select(0, cu_seqlens[:-1].clamp(max=hidden.shape[0] - 1))
