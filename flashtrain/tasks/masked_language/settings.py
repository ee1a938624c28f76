"""The settings of task=masked_language_model: `bert.*`, the model, and `masked.*`, how it is trained on masked text."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashtrain.errors import UserError, at_least, between
from flashtrain.settings.options import BertFamily, BertSize, Layout, Residual, Unit, option
from flashtrain.settings.text import TextSettings


@dataclass
class BertSettings:
    """The encoder: a size of models.BERT_SIZES as a family.

    family: bert, or modern (pre-norm, rotary positions, GeGLU, no biases). activation: a name of
    models.feed_forward.ACTIVATIONS (None: the family's own; of bert GELU in its tanh form, gelu_exact is what
    transformers computes by default). vocab_rows: of the embedding table (None: the tokens rounded up to a multiple of
    64). residual: between the blocks, under mixed precision: weights (float32) or compute (the half type, faster).
    """

    size: str = option("large", BertSize)
    family: str = option("bert", BertFamily)
    activation: str | None = None
    dropout: float = 0.0  # a probability
    vocab_rows: int | None = None
    residual: str = option("compute", Residual)

    @property
    def label(self) -> str:
        """Family and size, such as bert-large."""
        return f"{self.family}-{self.size}"

    def check(self) -> None:
        between("bert.dropout", self.dropout, 0.0, 1.0, include_high=False)
        at_least("bert.vocab_rows", self.vocab_rows, 1)


@dataclass
class MaskedSettings:
    """The samples and what of them is masked (data.masked_datamodule says what each means).

    unit: a sample is a sentence, paragraph or document, cut at `context` tokens; shortest: shorter pieces are joined to
    the next. token_budget: tokens of a micro-batch (None: as many as a
    GPU's memory holds); a step is trainer.tokens_per_step of them. layout: packed, or
    padded rows of the same samples. share: of the tokens, masked.
    validation_samples: held-out samples, at most (None: so many that a validation takes a tenth of the training's time,
    and 10,000 at most).
    """

    unit: str = option("paragraph", Unit)
    shortest: int = 16
    token_budget: int | None = 16384
    layout: str = option("packed", Layout)
    share: float = 0.15
    validation_samples: int | None = None

    def check(self) -> None:
        for name in ("shortest", "token_budget", "validation_samples"):
            at_least(f"masked.{name}", getattr(self, name), 1)
        between("masked.share", self.share, 0, 1, include_low=False)


@dataclass
class BertTextSettings(TextSettings):
    """Settings of a task of BERT."""

    bert: BertSettings = field(default_factory=BertSettings)

    def check(self) -> None:
        super().check()
        if self.data.source == "chat":
            raise UserError(f"data=chat trains language models, and this is task={self.task}. Use recipe=sft.")


@dataclass
class MaskedLanguageSettings(BertTextSettings):
    """Settings of BERT on masked text."""

    task: str = "masked_language_model"
    target_accuracy: float | None = None  # stop at this held-out accuracy, and say how long it took
    masked: MaskedSettings = field(default_factory=MaskedSettings)

    def check(self) -> None:
        super().check()
        between("target_accuracy", self.target_accuracy, 0, 1, include_low=False)
