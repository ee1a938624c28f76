"""What BERT is pre-trained with: the head that predicts masked tokens, and the one that tells next sentences.

M masked positions, N sequences, E embedding width, V rows of the embedding table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.models.bert_config import BertConfig
from flashtrain.models.normalization import normalization
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
