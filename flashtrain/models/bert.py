"""BERT (Devlin et al. 2019) with its pre-training heads, padded or without any padding.

    config = BertConfig.of_size("large", vocab_size=30522)
    model = Bert(config, attention="flash")
    loss = model.loss(tokens, masked, labels, cu_seqlens=cu_seqlens)       # tokens (T,): sequences end to end
    loss = model.loss(tokens, masked, labels, lengths=lengths)             # tokens (B, S): a sequence a row

B batch, S sequence, T packed tokens, N sequences (B of padded ones), M masked positions, E embedding width,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.models.bert_encoder import BertConfig, BertEncoder
from flashtrain.models.block import normalization, start_normal
from flashtrain.models.memory_savings import MemorySavings
from flashtrain.models.trainable import Trainable
from flashtrain_kernels import linear_cross_entropy

IGNORED = -100  # a label of this value is not scored (torch's convention)
BIAS_COLUMNS = 8  # what the bias adds to the matrix: 16 bytes in 16 bits, so that the product stays aligned
SCORED_AT_ONCE = 2048


class MaskedLanguageHead(nn.Module):
    """Scores of all tokens at masked positions (Devlin et al. 2019): dense, GELU, norm, then the token embedding.

    Its decoder is the token embedding, given at each call, and a bias of its own (none without config.bias).
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.approximate = "tanh" if config.activation == "gelu" else "none"
        self.dense = nn.Linear(config.embed, config.embed, bias=config.bias)
        self.norm = normalization("layernorm", config.embed, config.bias, config.epsilon)
        self.bias = nn.Parameter(torch.zeros(config.vocab_rows)) if config.bias else None

    def transform(self, hidden: Tensor) -> Tensor:
        """hidden (..., E) -> (..., E), what the decoder reads."""
        return self.norm(F.gelu(self.dense(hidden), approximate=self.approximate))

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        """hidden (..., E), table (V, E) -> logits (..., V); -inf in the rows that stand for no token."""
        logits = F.linear(self.transform(hidden), table, self.bias)
        if logits.shape[-1] > self.vocab_size:
            padding = torch.arange(logits.shape[-1], device=logits.device) >= self.vocab_size
            logits = logits.masked_fill(padding, -torch.inf)
        return logits

    def loss_sum(self, hidden: Tensor, table: Tensor, labels: Tensor, chunk: int | None = None) -> Tensor:
        """The sum of the cross-entropies in nats, a float32 scalar: hidden (M, E), table (V, E), labels (M,) int64.

        Labels of -100 count nothing. The bias goes into the product, as a column of the matrix that meets a column of
        ones, so that logits are never stored whole. chunk: positions whose logits are stored at once.
        """
        hidden = self.transform(hidden)
        if self.bias is not None:
            ones = torch.cat((hidden.new_ones(1), hidden.new_zeros(BIAS_COLUMNS - 1)))
            hidden = torch.cat((hidden, ones.expand(hidden.shape[0], -1)), dim=1)
            table = torch.cat((table, F.pad(self.bias[:, None], (0, BIAS_COLUMNS - 1)).to(table.dtype)), dim=1)
        return linear_cross_entropy(
            hidden, table, labels, vocab_size=self.vocab_size, ignore_index=IGNORED, chunk=chunk, reduction="sum"
        )

    @torch.no_grad()
    def correct(self, hidden: Tensor, table: Tensor, labels: Tensor) -> Tensor:
        """How many of the labels (M,) that are not -100 have the highest score; an int64 scalar."""
        right = [
            (self(piece, table).argmax(-1) == label).sum()
            for piece, label in zip(hidden.split(SCORED_AT_ONCE), labels.split(SCORED_AT_ONCE), strict=True)
        ]
        return torch.stack(right).sum() if right else labels.new_zeros(())


class Pooler(nn.Module):
    """tanh(dense(x)) of a sequence's first token: x (N, E) -> (N, E)."""

    def __init__(self, embed: int, bias: bool = True) -> None:
        super().__init__()
        self.dense = nn.Linear(embed, embed, bias=bias)

    def forward(self, first: Tensor) -> Tensor:
        """x (N, E) -> (N, E)."""
        return torch.tanh(self.dense(first))


class MaskedScore(NamedTuple):
    """Sums over a batch, scalars: cross-entropy in nats, labels whose token has the highest score, labels."""

    loss_sum: Tensor
    correct: Tensor
    labels: Tensor


class Bert(Trainable):
    """The encoder and the heads that its config names.

    attention, residual: see BertEncoder. The masked head's decoder is the token embedding.
    """

    def __init__(self, config: BertConfig, attention: str = "flash", residual: str = "compute") -> None:
        super().__init__()
        self.config = config
        self.encoder = BertEncoder(config, attention, residual)
        self.masked_head = MaskedLanguageHead(config) if config.masked_head else None
        self.pooler = Pooler(config.embed, config.bias) if config.pooler else None
        self.next_sentence = nn.Linear(config.embed, 2, bias=config.bias) if config.next_sentence else None
        self.savings = MemorySavings()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """BERT's start: weights normal(0, 0.02), biases 0."""
        start_normal(self)
        if self.masked_head is not None and self.masked_head.bias is not None:
            nn.init.zeros_(self.masked_head.bias)

    def save_memory(self, savings: MemorySavings) -> None:
        """Train with less memory for activations from now on; losses and gradients stay."""
        self.savings = savings
        self.encoder.save_memory(savings)

    @property
    def recomputes_blocks(self) -> bool:
        """Whether whole blocks are computed again in the backward: see Trainable."""
        return self.savings.checkpointing == "full" or self.savings.offload

    def compile_blocks(self, **options: Any) -> bool:
        """Each block through torch.compile with these options, what checkpointing does around it excepted."""
        self.encoder.compile_blocks(**options)
        return True

    @property
    def blocks(self) -> nn.ModuleList:
        """The encoder's blocks."""
        return self.encoder.blocks

    def forward(self, tokens: Tensor, **layout: Any) -> Tensor:
        """Logits (B, S, V) or (T, V); layout: segments, lengths, cu_seqlens, positions of the encoder."""
        return self._head()(self.encoder(tokens, **layout), self.token_table)

    @property
    def token_table(self) -> Tensor:
        """The token embedding (V, E), which the masked head scores with."""
        return self.encoder.token_embedding.weight

    @property
    def output_weight(self) -> Tensor:
        """The output matrix: the token embedding again. Optimisers that treat inner matrices apart look for it."""
        return self.token_table

    def loss(  # type: ignore[override]  # its labels are some of the tokens, and packed rows are told by lengths
        self,
        tokens: Tensor,
        masked: Tensor,
        labels: Tensor,
        *,
        segments: Tensor | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,
        label_count: Tensor | None = None,
        next_sentence: Tensor | None = None,
        sentence_count: Tensor | None = None,
    ) -> Tensor:
        """Mean cross-entropy in nats at the masked positions, a float32 scalar (plus that of next_sentence).

        tokens: padded (B, S) or packed (T,), some of them masked. masked: (M,) int64 indices into the tokens, row after
        row. labels: (M,) int64, the tokens that stood there; -100 counts nothing, so that M can be the same for all
        batches. segments, lengths, cu_seqlens, positions: see BertEncoder.forward.
        label_count: a scalar to divide by instead of the batch's own count of labels: with the same for every
        micro-batch of a step, the mean over them is the mean over the step's labels, however they are shared out.
        next_sentence: (N,) int64, 0 where the second segment followed the first, 1 where not, -100 for no pair;
        sentence_count: its divisor, as label_count.
        Written so that torch.compile(model.loss, fullgraph=True) works, with one compilation for equal T, N and M.
        """
        head = self._head()
        hidden = self.encoder(tokens, segments=segments, lengths=lengths, cu_seqlens=cu_seqlens, positions=positions)
        states = hidden.reshape(-1, hidden.shape[-1])
        total = head.loss_sum(states.index_select(0, masked), self.token_table, labels, self.savings.loss_chunk)
        loss = total / _divisor(label_count, labels).to(total.dtype)
        if next_sentence is not None:
            logits = self.next_sentence_logits(hidden, cu_seqlens)
            precise = torch.promote_types(logits.dtype, torch.float32)
            wrong = F.cross_entropy(logits.to(precise), next_sentence, ignore_index=IGNORED, reduction="sum")
            loss = loss + wrong / _divisor(sentence_count, next_sentence).to(precise)
        return loss

    @torch.no_grad()
    def score(self, tokens: Tensor, masked: Tensor, labels: Tensor, **layout: Any) -> MaskedScore:
        """What an evaluation adds up; arguments as in loss. The sums of all batches give loss and accuracy exactly."""
        head = self._head()
        hidden = self.encoder(tokens, **layout)
        states = hidden.reshape(-1, hidden.shape[-1]).index_select(0, masked)
        return MaskedScore(
            head.loss_sum(states, self.token_table, labels, self.savings.loss_chunk),
            head.correct(states, self.token_table, labels),
            (labels != IGNORED).sum(),
        )

    def pooled(self, hidden: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """The pooler's (N, E) of the encoder's states."""
        return cast(Pooler, self.pooler)(first_tokens(hidden, cu_seqlens))

    def next_sentence_logits(self, hidden: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """(N, 2) of the encoder's states."""
        return cast(nn.Linear, self.next_sentence)(self.pooled(hidden, cu_seqlens))

    def _head(self) -> MaskedLanguageHead:
        return cast(MaskedLanguageHead, self.masked_head)

    def parameter_count(self) -> int:
        """All parameters; the decoder, which is the token embedding, is counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops(self, lengths: Sequence[int], masked: int = 0) -> float:
        """FLOPs of a batch's forward and backward from its sequences' real lengths: see BertConfig.flops."""
        return self.config.flops(lengths, masked)

    def flops_per_token(self, context: int | None = None) -> float:
        """FLOPs of one token's forward and backward in sequences of `context` tokens, 15% of them masked.

        None: the config's own context. For batches of real lengths, `flops` is exact.
        """
        length = self.config.context if context is None else context
        return self.config.cost_per_token(0.15) + self.config.cost_per_pair() * length


def first_tokens(hidden: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The states (N, E) of each sequence's first token: hidden (B, S, E), or (T, E) with cu_seqlens (N + 1,).

    A sequence of length 0 gives the last token's, or whatever follows: give its label -100.
    """
    if cu_seqlens is None:
        return hidden[:, 0]
    return hidden.index_select(0, cu_seqlens[:-1].clamp(max=hidden.shape[0] - 1))


def _divisor(count: Tensor | None, labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum().clamp(min=1) if count is None else count
