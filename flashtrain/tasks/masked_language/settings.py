"""The settings of task=masked_language_model: `bert.*`, the model, and `masked.*`, how it is
trained on masked text."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashtrain.errors import UserError, at_least, between
from flashtrain.settings.options import BertFamily, BertSize, Layout, SampleUnit, option
from flashtrain.settings.text import TextSettings


@dataclass
class BertSettings:
    """The encoder's shape: one of models.BERT_SIZES, in the architecture of a family."""

    # Layers, heads and width of the encoder, as BERT's paper names them.
    size: str = option("large", BertSize)
    # BERT's own, or modern: pre-norm, rotary, GeGLU, no biases.
    family: str = option("bert", BertFamily)
    # Gelu (tanh form) or gelu_exact (transformers'); null: the family's own.
    activation: str | None = None
    # Probability of dropping embeddings, attention weights and outputs of the encoder's blocks.
    dropout: float = 0.0
    # Rows of the embedding table; null: the tokens, rounded up to a multiple of 64.
    vocab_rows: int | None = None

    @property
    def label(self) -> str:
        """A short name of the model: family and size, such as bert-large."""
        return f"{self.family}-{self.size}"

    def check(self) -> None:
        between("bert.dropout", self.dropout, 0.0, 1.0, include_high=False)
        at_least("bert.vocab_rows", self.vocab_rows, 1)


@dataclass
class MaskedSettings:
    """How text becomes samples and micro-batches, and how many tokens are masked."""

    sample_unit: str = option("paragraph", SampleUnit)  # what a sample is, cut at `context` tokens
    # Tokens of a micro-batch; null: as many as a GPU's memory holds.
    token_budget: int | None = 16384
    # packed: samples end to end in a row; padded: a row for each sample.
    layout: str = option("packed", Layout)
    mlm_probability: float = 0.15  # the share of tokens that the model has to guess
    # Samples a validation; null: a tenth of the time, at most 10,000.
    validation_samples: int | None = None

    def check(self) -> None:
        for name in ("token_budget", "validation_samples"):
            at_least(f"masked.{name}", getattr(self, name), 1)
        between("masked.mlm_probability", self.mlm_probability, 0, 1, include_low=False)


@dataclass
class BertTextSettings(TextSettings):
    """Settings shared by the tasks that train BERT on text."""

    bert: BertSettings = field(default_factory=BertSettings)

    def check(self) -> None:
        super().check()
        if self.data.source == "chat":
            raise UserError(
                f"data=chat trains language models, and this is task={self.task}. Use recipe=sft."
            )


@dataclass
class MaskedLanguageSettings(BertTextSettings):
    """Settings of BERT on masked text."""

    task: str = "masked_language_model"
    # Stop at this held-out accuracy, and report the time to it.
    target_accuracy: float | None = None
    masked: MaskedSettings = field(default_factory=MaskedSettings)

    def check(self) -> None:
        super().check()
        between("target_accuracy", self.target_accuracy, 0, 1, include_low=False)
