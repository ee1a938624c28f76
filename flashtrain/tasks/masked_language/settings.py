"""The settings of BERT: `bert.*`, the model, and `masked.*`, how it is trained on masked text."""

from __future__ import annotations

from dataclasses import dataclass

from flashtrain.errors import UserError, at_least, between, one_of

SIZES = ("tiny", "base", "large")
FAMILIES = ("bert", "modern")
UNITS = ("sentence", "paragraph", "document")
LAYOUTS = ("packed", "padded")
BALANCES = ("cost", "tokens")


@dataclass
class BertSettings:
    """The encoder: a size of models.BERT_SIZES as a family.

    family: bert, or modern (pre-norm, rotary positions, GeGLU, no biases). activation: a name of
    models.feed_forward.FEED_FORWARDS (None: the family's own; of bert GELU in its tanh form, gelu_exact is what
    transformers computes by default). vocab_rows: of the embedding table (None: the tokens rounded up to a multiple of
    64). residual: between the blocks, under mixed precision: weights (float32) or compute (the half type, faster).
    """

    size: str = "large"  # tiny | base | large
    family: str = "bert"
    activation: str | None = None
    dropout: float = 0.0  # a probability
    vocab_rows: int | None = None
    residual: str = "compute"

    @property
    def label(self) -> str:
        """Family and size, such as bert-large."""
        return f"{self.family}-{self.size}"

    def check(self) -> None:
        one_of("bert.size", self.size, SIZES)
        one_of("bert.family", self.family, FAMILIES)
        between("bert.dropout", self.dropout, 0.0, 1.0, include_high=False)
        if self.vocab_rows is not None:
            at_least("bert.vocab_rows", self.vocab_rows, 1)
        one_of("bert.residual", self.residual, ("weights", "compute"))


@dataclass
class MaskedSettings:
    """The samples and what of them is masked (data.masked_datamodule says what each means).

    unit: a sample is a sentence, paragraph or document, cut at `context` tokens; shortest: shorter pieces are joined to
    the next. token_budget: tokens of a micro-batch (None: as many as a
    GPU's memory holds); a step is trainer.tokens_per_step of them. layout: packed, or
    padded rows of the same samples. share: of the tokens, masked. pairs: two pieces a sample, and next-sentence
    prediction. balance: rows of a step are evened by cost (attention's square included) or by tokens alone.
    validation_samples: held-out samples, at most (None: so many that a validation takes a tenth of the training's time,
    and 10,000 at most).
    """

    unit: str = "paragraph"
    shortest: int = 16
    token_budget: int | None = 16384
    layout: str = "packed"
    share: float = 0.15
    pairs: bool = False
    balance: str = "cost"
    validation_samples: int | None = None

    def check(self) -> None:
        one_of("masked.unit", self.unit, UNITS)
        one_of("masked.layout", self.layout, LAYOUTS)
        one_of("masked.balance", self.balance, BALANCES)
        for name in ("shortest", "token_budget", "validation_samples"):
            if getattr(self, name) is not None:
                at_least(f"masked.{name}", getattr(self, name), 1)
        if not 0 < self.share <= 1:
            raise UserError(f"masked.share={self.share} must be above 0, and at most 1.")
