"""task=fine_tuning: BERT with a head for labels of texts or of their words (recipe=finetune, long-document).

Its settings `finetune.*`: what is labelled, where it is read, and the head on BERT.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtrain.settings.settings import Settings
from flashtrain.spec import TRAIN, Condition, Loaded, Prepared, Rule, does, measured_words, say_finished, task_heeds
from flashtrain.tasks.masked_language.spec import MaskedTask

if TYPE_CHECKING:
    from flashtrain.training.hardware import Hardware
from dataclasses import dataclass

from flashtrain.errors import UserError, at_least, between, one_of

TARGETS = ("labels", "class", "tokens")
DATA = ("cues", "files", "hub")
POOLINGS = ("first", "mean", "max")
LAYOUTS = ("packed", "padded")


@dataclass
class FineTuningSettings:
    """What BERT learns to label.

    target: any number of labels a text (scored by micro-F1), one class a text, or a label for each word (both scored by
    accuracy). data: cues (data.cue_documents, made up), files (path: a .jsonl file, or a folder of them) or hub (name,
    config: a dataset that `datasets` loads). text_column, words_column, labels_column: of a line; words and their
    labels are two lists of one length. pooling, dropout: of the head. layout: packed without padding, or padded rows.
    batch: texts of a step, over all devices. tokens_at_once: a device computes at most so many (one text at least)
    where trainer.micro_batch does not say, and
    fewer where a GPU's memory holds fewer. train, validation, test: texts of each part, at most. validation_fraction:
    of the texts, held out where no file or split is for it.
    length, shortest, labels, presence: of made-up documents (CueDocuments). seed: of these, and of what is held out.
    """

    target: str = "labels"
    data: str = "cues"
    path: str | None = None  # a .jsonl file, or a folder with train*.jsonl (and validation*, test*)
    name: str | None = None  # of finetune.data=hub: the dataset
    config: str | None = None
    text_column: str = "text"
    words_column: str = "words"
    labels_column: str = "labels"
    pooling: str = "mean"
    dropout: float = 0.0
    layout: str = "packed"
    batch: int = 32
    tokens_at_once: int = 65536
    train: int | None = None
    validation: int | None = None
    test: int | None = None
    validation_fraction: float = 0.1
    length: int = 16384
    shortest: int | None = None
    labels: int = 8
    presence: float = 0.2
    seed: int = 0

    @property
    def data_label(self) -> str:
        """The texts in a word: cues, the file's or folder's name, or the dataset's."""
        if self.data == "files" and self.path:
            return Path(self.path).name
        return "cues" if self.data == "cues" else " ".join(filter(None, (self.name, self.config)))

    def check(self) -> None:
        one_of("finetune.target", self.target, TARGETS)
        one_of("finetune.data", self.data, DATA)
        one_of("finetune.pooling", self.pooling, POOLINGS)
        one_of("finetune.layout", self.layout, LAYOUTS)
        between("finetune.dropout", self.dropout, 0.0, 1.0, include_high=False)
        for name in ("batch", "tokens_at_once", "length", "labels", "train", "validation", "test", "shortest"):
            given = getattr(self, name)
            at_least(f"finetune.{name}", given, 1)
        for name in ("validation_fraction", "presence"):
            between(f"finetune.{name}", getattr(self, name), 0, 1, include_low=False, include_high=False)
        at_least("finetune.seed", self.seed, 0)

    def check_data(self) -> None:
        """Raise UserError where what is to be read is not named. Apart from check(), since a demo may replace it."""
        if self.data == "files" and not self.path:
            raise UserError("finetune.data=files needs finetune.path=..., a .jsonl file or a folder of them.")
        if self.data == "hub" and not self.name:
            raise UserError("finetune.data=hub needs finetune.name=..., a dataset such as coastalcph/lex_glue.")
        if self.path and self.data != "files":
            raise UserError(f"finetune.path={self.path} is read with finetune.data=files, and not with {self.data}.")
        if self.name and self.data != "hub":
            raise UserError(f"finetune.name={self.name} is read with finetune.data=hub, and not with {self.data}.")
        if self.data == "cues" and self.target != "labels":
            raise UserError(f"finetune.target={self.target}: made-up documents (finetune.data=cues) have labels only.")
        if self.data == "hub" and self.target == "tokens":
            raise UserError("finetune.target=tokens is read from finetune.data=files: lines of words and labels.")


class FineTuningTask(MaskedTask):
    """BERT on labelled texts; its settings and its demo are told as those of masked text."""

    heeds = ("bert", "finetune", "data", "context")

    def check_step(self, settings: Settings, given: Collection[str]) -> None:
        from flashtrain.tasks.fine_tuning.prepare import check_fine_tuning_step

        check_fine_tuning_step(settings)

    def columns(self, settings: Settings) -> dict[str, Any]:
        asked = settings.finetune
        return {
            "model": settings.named(settings.bert.label),
            "data": settings.finetune.data_label,
            "target": asked.target,
            "context": settings.context,
            "batch": asked.batch,
            "steps": settings.trainer.steps,
            "samples": settings.trainer.steps * asked.batch,
            "devices": settings.trainer.ranks,
        }

    def prepare(self, settings: Settings, hardware: Hardware) -> Prepared:
        from flashtrain.tasks.fine_tuning.prepare import prepare

        return prepare(settings, hardware)

    def plan(self, settings: Settings, hardware: Hardware) -> str:
        from flashtrain.tasks.fine_tuning.prepare import plan_fine_tuning

        return plan_fine_tuning(settings, hardware)

    def say(self, row: dict[str, Any], folder: Path, settings: Settings) -> None:
        from flashtrain.tasks.fine_tuning.task import score_of

        rate = row["tokens_per_second"]
        speed = "" if rate is None else f"{rate:,.0f} real tokens/s{measured_words(row)}, "
        what = f"{row['model']} on {row['data']}, context {row['context']:,}"
        say_finished(
            folder,
            f"finished {what}: {score_of(row)}, on {row['scored']} texts",
            f"{speed}{row['samples']:,} texts trained on, {row['seconds']:.0f} s for the whole command",
        )

    def run_mode(self, settings: Settings, hardware: Hardware) -> dict[str, Any]:
        from flashtrain.tasks.fine_tuning.evaluate import run_fine_tuning_mode

        return run_fine_tuning_mode(settings, hardware)

    def load(self, settings: Settings, hardware: Hardware) -> Loaded:
        from flashtrain.tasks.fine_tuning.evaluate import read_tuned

        tuned = read_tuned(settings, hardware)
        model = tuned.model.eval().to(hardware.kind)
        return Loaded(model, tuned.tokenizer, settings, tuned.folder, tuned.path, tuned.step)


def _labelled(*names: str) -> Condition:
    """Whether these are what is fine-tuned on."""
    return lambda settings: settings.finetune.data in names


def _words(settings: Settings) -> bool:
    return settings.finetune.target == "tokens"


def _texts(settings: Settings) -> bool:
    return settings.finetune.target != "tokens"


RULES = (
    Rule(
        "data.path data.config data.split data.text_column data.streaming data.include_tests",
        lambda settings: not task_heeds("finetune")(settings),
        "trainings on plain text; labelled texts are finetune.data, finetune.path and finetune.name",
    ),
    Rule("finetune", does(TRAIN, "evaluate", task="finetune"), "recipe=finetune, long-document"),
    Rule(
        "finetune.length finetune.shortest finetune.labels finetune.presence",
        _labelled("cues"),
        "made-up documents (finetune.data=cues)",
    ),
    Rule(
        "finetune.text_column finetune.words_column finetune.labels_column finetune.validation_fraction",
        _labelled("files", "hub"),
        "finetune.data=files, hub",
    ),
    Rule("finetune.config", _labelled("hub"), "finetune.data=hub"),
    Rule("finetune.words_column", _words, "finetune.target=tokens"),
    Rule("finetune.text_column finetune.pooling", _texts, "finetune.target=labels, class"),
)
