"""task=masked_language_model: BERT trained to find masked tokens (recipe=bert, bert-lamb).

Its settings: `bert.*`, the model, and `masked.*`, how it is trained on masked text. Who heeds them stands at the end.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtrain.settings.settings import Settings
from flashtrain.spec import (
    OF_TOKENS,
    TRAIN,
    Loaded,
    Prepared,
    Rule,
    Task,
    contexts_words,
    does,
    either,
    measured_words,
    measures,
    never,
    no_weights,
    say_finished,
    trains,
    unless,
)

if TYPE_CHECKING:
    from flashtrain.training.hardware import Hardware
from dataclasses import dataclass

from flashtrain.errors import at_least, between, one_of

SIZES = ("tiny", "base", "large")
FAMILIES = ("bert", "modern")
UNITS = ("sentence", "paragraph", "document")
LAYOUTS = ("packed", "padded")


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
        at_least("bert.vocab_rows", self.vocab_rows, 1)
        one_of("bert.residual", self.residual, ("weights", "compute"))


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

    unit: str = "paragraph"
    shortest: int = 16
    token_budget: int | None = 16384
    layout: str = "packed"
    share: float = 0.15
    validation_samples: int | None = None

    def check(self) -> None:
        one_of("masked.unit", self.unit, UNITS)
        one_of("masked.layout", self.layout, LAYOUTS)
        for name in ("shortest", "token_budget", "validation_samples"):
            at_least(f"masked.{name}", getattr(self, name), 1)
        between("masked.share", self.share, 0, 1, include_low=False)


class MaskedTask(Task):
    """BERT on masked text."""

    groups = ("bert", "masked", "finetune")
    generates = shards = False
    heeds: tuple[str, ...] = ("bert", "masked", "data", "context", "target_accuracy", *OF_TOKENS)

    def check_step(self, settings: Settings, given: Collection[str]) -> None:
        from flashtrain.tasks.masked_language.build import check_masked_step

        check_masked_step(settings)

    def columns(self, settings: Settings) -> dict[str, Any]:
        asked = settings.masked
        return {
            "model": settings.named(settings.bert.label),
            "unit": asked.unit,
            "layout": asked.layout,
            "context": settings.context,
            "token_budget": asked.token_budget,
            "optimizer": settings.optimizer.name,
            "steps": settings.trainer.steps,
            "devices": settings.trainer.ranks,
        }

    def prepare(self, settings: Settings, hardware: Hardware) -> Prepared:
        from flashtrain.tasks.masked_language.prepare import prepare

        return prepare(settings, hardware)

    def plan(self, settings: Settings, hardware: Hardware) -> str:
        from flashtrain.tasks.masked_language.prepare import plan_masked

        return plan_masked(settings, hardware)

    def say(self, row: dict[str, Any], folder: Path, settings: Settings) -> None:
        held_out = "" if row["validation_loss"] is None else f" (held-out {row['validation_loss']:.3f})"
        accuracy = "" if row["validation_accuracy"] is None else f", accuracy {row['validation_accuracy']:.2%} held out"
        first = "?" if row["train_loss_first"] is None else f"{row['train_loss_first']:.3f}"
        loss = "" if row["train_loss"] is None else f": loss {first} -> {row['train_loss']:.3f}"
        lines = [f"finished {row['model']}{loss}{held_out}{accuracy}, after {row['tokens']:,} real tokens"]
        if row["seconds_to_target"] is not None:
            lines.append(
                f"target accuracy {row['target_accuracy']:g} reached after {row['steps']} steps and "
                f"{row['seconds_to_target']:.1f} s of training"
            )
        elif row["target_accuracy"] is not None:
            lines.append(f"target accuracy {row['target_accuracy']:g} was not reached in {row['steps']} steps")
        if row["tokens_per_second"] is not None:
            rates = f"{row['tokens_per_second']:,.0f} real tokens/s, {row['rows_per_second']:,.1f} samples/s"
            lines.append(f"{rates}{measured_words(row)}, rows {row['fill']:.1%} full")
        say_finished(folder, *lines, f"{row['seconds']:.0f} s for the whole command")

    def run_mode(self, settings: Settings, hardware: Hardware) -> dict[str, Any]:
        from flashtrain.tasks.masked_language.prepare import run_masked_mode

        return run_masked_mode(settings, hardware)

    def load(self, settings: Settings, hardware: Hardware) -> Loaded:
        from flashtrain.tasks.masked_language.build import read_bert
        from flashtrain.tasks.masked_language.prepare import trained_bert

        saved = read_bert(str(settings.checkpoint))
        model = trained_bert(saved, settings, hardware)
        return Loaded(model, saved.tokenizer, settings, saved.folder, saved.path, saved.step)

    def demo_line(self, full: Settings, demo: Settings, where: str) -> str:
        trained, meant = (f"{one.bert.label}, {contexts_words(one)}" for one in (demo, full))
        full_size = f" ({meant})" if meant != trained else ""
        return f"training the recipe's small demo instead ({trained}). For the recipe in full{full_size}, {where}"


RULES = (
    Rule(
        "bert",
        either(does(TRAIN, "evaluate", task="bert"), measures("bert")),
        "recipe=bert, bert-lamb, bert-speed, finetune, long-document",
    ),
    Rule("bert.size", trains("bert"), "trainings of BERT; recipe=bert-speed has benchmark.models"),
    Rule("bert.dropout", trains("bert"), "trainings of BERT; recipe=bert-speed has benchmark.dropouts"),
    Rule("bert.vocab_rows", trains("bert"), "trainings of BERT"),
    Rule(
        "bert.family bert.activation",
        either(trains("bert"), measures("bert")),
        "trainings of BERT and recipe=bert-speed; a checkpoint's model is as it was trained",
    ),
    Rule(
        "bert.size bert.family bert.activation bert.vocab_rows",
        no_weights,
        "trainings without weights=, which have a shape of their own",
    ),
    Rule(
        "masked",
        either(does(TRAIN, "evaluate", task="masked"), measures("bert")),
        "recipe=bert, bert-lamb, bert-speed",
    ),
    Rule("masked.unit", unless(does(TRAIN, "evaluate"), never), "trainings; here it is benchmark.units"),
    Rule("masked.layout", unless(does(TRAIN, "evaluate"), never), "trainings; here benchmark.implementations is"),
)
