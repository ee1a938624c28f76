"""The settings of task=fine_tuning: `finetune.*`, what is labelled, where it is read, and the head on BERT."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from flashtrain.errors import UserError, at_least, between
from flashtrain.settings.options import LabelledData, Layout, Pooling, Target, option
from flashtrain.tasks.masked_language.settings import BertTextSettings


@dataclass
class FineTuningSettings:
    """What BERT learns to label.

    target: any number of labels a text (scored by micro-F1), one class a text, or a label for each word (both scored by
    accuracy). data: cues (documents that recipes/ makes), files (path: a .jsonl or .parquet file, or a folder) or hub
    (name, config: a dataset that `datasets` loads). text_column, words_column, labels_column: of a row; words and
    their labels are two lists of one length. pooling, dropout: of the head. layout: packed without padding, or padded
    rows. batch: texts of a step, over all devices. tokens_at_once: a device computes at most so many (one text at
    least) where trainer.micro_batch does not say, and fewer where a GPU's memory holds fewer. train, validation, test:
    texts of each part, at most. validation_fraction: of the texts, held out where no file or split is for it.
    length, labels: of synthetic documents.
    """

    target: str = option("labels", Target)
    data: str = option("cues", LabelledData)
    path: str | None = None  # a .jsonl file, or a folder with train*.jsonl (and validation*, test*)
    name: str | None = None  # of finetune.data=hub: the dataset
    config: str | None = None
    text_column: str = "text"
    words_column: str = "words"
    labels_column: str = "labels"
    pooling: str = option("mean", Pooling)
    dropout: float = 0.0
    layout: str = option("packed", Layout)
    batch: int = 32
    tokens_at_once: int = 65536
    train: int | None = None
    validation: int | None = None
    test: int | None = None
    validation_fraction: float = 0.1
    length: int = 16384
    labels: int = 8

    @property
    def data_label(self) -> str:
        """The texts in a word: cues, the file's or folder's name, or the dataset's."""
        if self.data == "files" and self.path:
            return Path(self.path).name
        return "cues" if self.data == "cues" else " ".join(filter(None, (self.name, self.config)))

    def check(self) -> None:
        between("finetune.dropout", self.dropout, 0.0, 1.0, include_high=False)
        for name in ("batch", "tokens_at_once", "length", "labels", "train", "validation", "test"):
            at_least(f"finetune.{name}", getattr(self, name), 1)
        between("finetune.validation_fraction", self.validation_fraction, 0, 1, include_low=False, include_high=False)

    def check_data(self) -> None:
        """Raise UserError where what is to be read is not named. Apart from check(), since a demo may replace it."""
        if self.data == "files" and not self.path:
            raise UserError("finetune.data=files needs finetune.path=..., a .jsonl file or a folder of them.")
        if self.data == "hub" and not self.name:
            raise UserError("finetune.data=hub needs finetune.name=..., a dataset such as coastalcph/lex_glue.")
        if self.path and self.data != "files":
            raise UserError(f"finetune.path={self.path} is used by finetune.data=files, not by {self.data}. Remove it.")
        if self.name and self.data != "hub":
            raise UserError(f"finetune.name={self.name} is used by finetune.data=hub, not by {self.data}. Remove it.")
        if self.data == "cues" and self.target != "labels":
            raise UserError(
                f"finetune.target={self.target}: finetune.data=cues has labels only. Use finetune.target=labels."
            )


@dataclass
class LabelledSettings(BertTextSettings):
    """Settings of BERT on labelled texts. `data` says how they become tokens."""

    task: str = "fine_tuning"
    finetune: FineTuningSettings = field(default_factory=FineTuningSettings)

    def check(self) -> None:
        super().check()
        if self.data.source != "stdlib":
            raise UserError(
                f"data={self.data.source}: set labelled texts with finetune.data, finetune.path and finetune.name."
            )
