"""The cases of recipe=bert-speed: a BERT of one size, on full rows or on
sequences of a text's lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from flashtrain.announce import say
from flashtrain.data.masking import masked_count
from flashtrain.errors import UserError
from flashtrain.models.bert_config import BertConfig
from flashtrain.settings.settings import Settings
from flashtrain.tasks.masked_language.prepare import make_masked_data
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.bert_benchmark.batches import SHARE, Sequences
from flashtrain_recipes.harness.rows import Row
from flashtrain_recipes.step_benchmark.cases import StepCase, batches_of

VOCAB_SIZE = 30528  # BERT's 30,522 rounded up to a multiple of 64, for every baseline alike


@dataclass(frozen=True)
class BertCase(StepCase):
    """A BERT whose training steps are timed, on full rows or on sequences with a text's lengths.

    One launch makes the steps that train on every sequence once.
    """

    size: str
    context: int
    batch: int  # rows of a padded step
    # "sentence", "paragraph" or "document": what of the text has the lengths; "": full rows.
    unit: str
    dropout: float
    weights: str
    activation: str = "gelu"  # the tanh form, or "gelu_exact"
    lengths: tuple[int, ...] = ()

    def __str__(self) -> str:
        what = f"full rows of {self.context}"
        if self.unit:
            what = f"{self.unit}s up to {self.context}"
        return (
            f"{self.model}, {what}, dropout {self.dropout:g}, weights {self.weights}, "
            f"batch {self.batch}"
        )

    @property
    def model(self) -> str:
        return f"bert-{self.size}"

    @property
    def kind(self) -> tuple[Any, ...]:
        return (self.size, self.unit, self.dropout, self.weights)

    def config(self) -> BertConfig:
        """Return the model configuration that every baseline builds, with the
        masked-language head and no pooler."""
        context = max(512, self.context)  # rows of the position table, as BERT has them
        made = BertConfig.of_size(
            self.size,
            vocab_size=VOCAB_SIZE,
            context=context,
            dropout=self.dropout,
            activation=self.activation,
        )
        return replace(made, vocab_rows=VOCAB_SIZE)

    def all_lengths(self) -> np.ndarray:
        """Return the lengths of a launch's sequences: `batch` full rows, or all sequences
        of the text's lengths."""
        return np.array(self.lengths or [self.context] * self.batch, dtype=np.int64)

    def draw(self, device: torch.device, seed: int) -> Sequences:
        """Return random sequences in main memory; each baseline makes its batches of them."""
        return Sequences.draw(self.all_lengths(), VOCAB_SIZE, seed)

    def flops(self) -> float:
        """Return the FLOPs of the model in one launch, which trains on every sequence once;
        padding is not counted."""
        lengths = self.all_lengths()
        return self.config().flops(
            lengths.tolist(), int(masked_count(np.maximum(lengths - 2, 1), SHARE).sum())
        )

    def flops_per_token(self) -> float:
        return self.flops() / float(self.all_lengths().sum())

    def columns(self) -> Row:
        return {
            "model": self.model, "length": self.unit or self.context, "longest": self.context,
            "dropout": self.dropout,
            "batch": self.batch, "weights": self.weights, "activation": self.activation,
        }  # fmt: skip

    def rates(self, milliseconds: float, peak_flops: float | None) -> Row:
        lengths, seconds = self.all_lengths(), milliseconds / 1e3
        return {
            "rows_per_second": round(len(lengths) / seconds, 2),
            "real_tokens_per_second": round(float(lengths.sum()) / seconds, 1),
            "mfu": None if peak_flops is None else round(self.flops() / seconds / peak_flops, 4),
        }


def cases(settings: Settings) -> list[BertCase]:
    """Return a case for every requested size, precision, dropout, length and batch;
    with_lengths completes them."""
    options = settings.benchmark
    activation = settings.bert.activation or "gelu"
    if settings.bert.family != "bert" or activation not in ("gelu", "gelu_exact"):
        raise UserError(
            f"bert.family={settings.bert.family} with bert.activation={activation}: Hugging Face's "
            "BERT lacks them; expected bert.family=bert with bert.activation=gelu or gelu_exact."
        )
    longest = max(options.contexts, default=settings.context)
    kinds = [(context, "") for context in options.contexts] + [
        (longest, unit) for unit in options.sample_units
    ]
    return [
        BertCase(size, context, batch, unit, dropout, weights, activation)
        for size in options.models
        for weights in options.weights
        for dropout in options.dropouts
        for context, unit in kinds
        for batch in batches_of(options, context)
    ]


def with_lengths(case: BertCase, settings: Settings, hardware: Hardware) -> BertCase:
    """Return the case with lengths drawn from the text's sentences, paragraphs or
    documents, as `unit` says.

    [CLS] and [SEP] count as two tokens of each length.
    """
    if not case.unit:
        return case
    budget = max(case.context, settings.masked.token_budget or 0)
    masked = replace(settings.masked, sample_unit=case.unit, token_budget=budget)
    data = make_masked_data(settings.having(context=case.context, masked=masked), hardware)
    data.setup()
    lengths = data.pieces(data.split.training).lengths + 2
    drawn = np.random.RandomState(settings.seed).choice(lengths, settings.benchmark.samples)
    say(
        f"{case.unit}s of {data.source.describe()} in {data.tokenizer.describe()}: "
        f"{lengths.mean():.0f} tokens on average; the {len(drawn):,} drawn for the benchmark "
        f"have {drawn.mean():.0f}"
    )
    return replace(case, lengths=tuple(int(length) for length in drawn))
