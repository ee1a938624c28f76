"""What bert-speed trains: a BERT of one size at one dropout, on full rows or on sequences of a text's lengths.

N sequences, S tokens of the longest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from flashtrain.announce import say
from flashtrain.data.masking import masked_count
from flashtrain.errors import UserError
from flashtrain.models.bert_encoder import BertConfig
from flashtrain.settings.settings import Settings
from flashtrain.tasks.masked_language.build import make_masked_data
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.bert_benchmark.batches import SHARE, Sequences
from flashtrain_recipes.step_benchmark.cases import WeightsHeld

VOCAB_SIZE = 30528  # BERT's 30,522 rounded up to a multiple of 64, for every implementation alike


@dataclass(frozen=True)
class BertCase(WeightsHeld):
    """size, family-bert's; context: S. unit: "" for full rows, or what the lengths are of. lengths: (N,) of those.

    activation: "gelu" (the tanh form) or "gelu_exact", of every implementation.
    """

    size: str
    context: int
    unit: str
    dropout: float
    weights: str
    activation: str = "gelu"
    lengths: tuple[int, ...] = ()

    def __str__(self) -> str:
        what = f"full rows of {self.context}" if not self.unit else f"{self.unit}s up to {self.context}"
        return f"{self.model}, {what}, dropout {self.dropout:g}, weights {self.weights}"

    @property
    def model(self) -> str:
        """Such as bert-large."""
        return f"bert-{self.size}"

    def config(self) -> BertConfig:
        """The shape that every implementation builds: masked head, no pooler."""
        context = max(512, self.context)  # rows of the position table, as BERT has them
        made = BertConfig.of_size(
            self.size, vocab_size=VOCAB_SIZE, context=context, dropout=self.dropout, activation=self.activation
        )
        return replace(made, vocab_rows=VOCAB_SIZE)

    def lengths_of(self, batch: int) -> np.ndarray:
        """(N,): of the sequences of a call; `batch` full rows, or all of the text's lengths."""
        return np.array(self.lengths, dtype=np.int64) if self.unit else np.full(batch, self.context, dtype=np.int64)

    def draw(self, batch: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels (N, S) int64 in main memory, from where each implementation batches them."""
        drawn = Sequences.draw(self.lengths_of(batch), VOCAB_SIZE, seed)
        return torch.from_numpy(drawn.tokens), torch.from_numpy(drawn.labels)

    def flops_of(self, batch: int) -> float:
        """Model FLOPs of a call by the real lengths: nothing counts for padding."""
        lengths = self.lengths_of(batch)
        return self.config().flops(lengths.tolist(), int(masked_count(np.maximum(lengths - 2, 1), SHARE).sum()))

    def flops_per_token(self) -> float:
        """Of a token of a full row."""
        return self.flops_of(1) / self.context if not self.unit else self.flops_of(1) / sum(self.lengths)


def cases(settings: Settings) -> list[BertCase]:
    """Every size, precision, dropout and length asked for; those of a text without its lengths yet."""
    asked = settings.benchmark
    activation = settings.bert.activation or "gelu"
    if settings.bert.family != "bert" or activation not in ("gelu", "gelu_exact"):
        raise UserError(
            f"bert.family={settings.bert.family} with {activation}: Hugging Face's BERT has neither; choose "
            "bert.family=bert, with bert.activation=gelu or gelu_exact."
        )
    longest = max(asked.contexts, default=settings.context)
    kinds = [(context, "") for context in asked.contexts] + [(longest, unit) for unit in asked.units]
    return [
        BertCase(size, context, unit, dropout, weights, activation)
        for size in asked.models
        for weights in asked.weights
        for dropout in asked.dropouts
        for context, unit in kinds
    ]


def with_lengths(case: BertCase, settings: Settings, hardware: Hardware) -> BertCase:
    """The case with lengths drawn from the text's: of its units, [CLS] and [SEP] included."""
    if not case.unit:
        return case
    told = settings.having(
        context=case.context,
        masked=replace(
            settings.masked, unit=case.unit, token_budget=max(case.context, settings.masked.token_budget or 0)
        ),
    )
    data = make_masked_data(told, hardware)
    data.setup()
    lengths = data.pieces(data.split.training).lengths + 2
    random = np.random.RandomState(settings.seed)
    drawn = random.choice(lengths, settings.benchmark.samples)
    say(
        f"{case.unit}s of {data.source.describe()} in {data.tokenizer.describe()}: {lengths.mean():.0f} tokens in the "
        f"mean, {drawn.mean():.0f} of the {len(drawn):,} drawn"
    )
    return replace(case, lengths=tuple(int(length) for length in drawn))
