"""The settings of task=fine_tuning (`finetune.*`): which texts and labels are
read, and the head on BERT."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from flashtrain.errors import UserError, at_least, between
from flashtrain.settings.options import LabelledData, Pooling, Target, option
from flashtrain.tasks.masked_language.settings import BertTextSettings


@dataclass
class FineTuningSettings:
    """The labels that BERT learns, the texts that have them, and the head."""

    # labels of a text, its one class, or a label for each word (tokens).
    target: str = option("labels", Target)
    # made-up documents, finetune.path, or the dataset finetune.name.
    data: str = option("synthetic", LabelledData)
    # A .jsonl or .parquet file, or a folder with train*.jsonl (and validation*, test*).
    path: str | None = None
    name: str | None = None  # the dataset of the hub with labelled texts (finetune.data=hub)
    config: str | None = None  # the configuration of that dataset (finetune.data=hub)
    text_column: str = "text"  # the field of a row that holds the text
    # The field of a row that holds the list of words (finetune.target=tokens).
    words_column: str = "words"
    # The field of a row that holds the labels; of words, a list of the same length.
    labels_column: str = "labels"
    # What of the encoder's outputs the head for whole texts reads.
    pooling: str = option("mean", Pooling)
    queries: int = 32  # queries of pooling=probe, which divide the encoder's width
    frozen: bool = False  # whether the encoder stays as it is, so that the head alone is trained
    dropout: float = 0.0  # probability of dropping what the head reads
    batch: int = 32  # labelled texts of an optimizer step, over all devices
    # A device computes at most so many at once (a text at least) without micro_batch.
    tokens_at_once: int = 65536
    train: int | None = None  # the most texts to train on; null: all
    validation: int | None = None  # the most texts to validate on; null: all
    test: int | None = None  # the most texts to test on; null: all
    validation_fraction: float = 0.1  # the share of texts held out if there is no validation split
    length: int = 16384  # tokens of a made-up document (finetune.data=synthetic)
    labels: int = 8  # how many labels made-up documents have (finetune.data=synthetic)

    @property
    def data_label(self) -> str:
        """A short name of the texts: "synthetic", or the name of the file, folder or dataset."""
        if self.data == "files" and self.path:
            return Path(self.path).name
        if self.data == "synthetic":
            return "synthetic"
        return " ".join(filter(None, (self.name, self.config)))

    def check(self) -> None:
        between("finetune.dropout", self.dropout, 0.0, 1.0, include_high=False)
        for name in ("batch", "tokens_at_once", "length", "labels", "train", "validation", "test"):
            at_least(f"finetune.{name}", getattr(self, name), 1)
        between(
            "finetune.validation_fraction",
            self.validation_fraction,
            0,
            1,
            include_low=False,
            include_high=False,
        )

    def check_data(self) -> None:
        """Raise UserError if the texts to read are not named. check() does not check this: a demo
        may replace the settings."""
        files = "a .jsonl file or a folder of them"
        dataset = "a dataset such as coastalcph/lex_glue"
        for setting, data, what in (("path", "files", files), ("name", "hub", dataset)):
            given = getattr(self, setting)
            if self.data == data and not given:
                raise UserError(f"finetune.data={data} needs finetune.{setting}=..., {what}.")
            if given and self.data != data:
                raise UserError(
                    f"finetune.{setting}={given} is used by finetune.data={data}, "
                    f"not by finetune.data={self.data}. Remove finetune.{setting}."
                )
        if self.data == "synthetic" and self.target != "labels":
            raise UserError(
                f"finetune.target={self.target} does not suit finetune.data=synthetic, "
                "whose documents have several labels. Use finetune.target=labels."
            )


@dataclass
class LabelledSettings(BertTextSettings):
    """Settings of BERT with a head on labelled texts. `data` says how the texts become tokens."""

    task: str = "fine_tuning"
    finetune: FineTuningSettings = field(default_factory=FineTuningSettings)

    def check(self) -> None:
        super().check()
        if self.data.source != "stdlib":
            raise UserError(
                f"data={self.data.source} reads texts without labels. "
                "Set finetune.data=files finetune.path=..., or finetune.data=hub "
                "finetune.name=..."
            )
