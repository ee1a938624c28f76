"""The labelled texts of a run, in splits to train on, to validate on and to test on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flashtrain.data.labelled_documents import LabelledSamples
from flashtrain.data.labelled_rows import (
    SUFFIXES,
    Columns,
    Row,
    dataset_rows,
    encode_rows,
    file_rows,
    labels_in,
)
from flashtrain.data.sequences import SequenceShape
from flashtrain.data.split_names import split_named
from flashtrain.data.tokenizers import Tokenizer, TokenizerSpec, make_tokenizer
from flashtrain.data.wordpiece import SpecialTokens
from flashtrain.errors import UserError
from flashtrain.registry import component
from flashtrain.settings.settings import Settings
from flashtrain.tasks.masked_language.trained import special_tokens

if TYPE_CHECKING:
    from flashtrain.tasks.fine_tuning.settings import FineTuningSettings

SPLITS = ("train", "validation", "test")


@dataclass
class LabelledSource:
    """The labelled samples of a run by split, in the form that SequenceDataModule reads."""

    samples: dict[str, LabelledSamples]  # by split; there may be none for "test"
    label_names: tuple[str, ...]
    special: SpecialTokens
    tokenizer: Tokenizer | None  # of texts; None of synthetic documents
    words: str  # what the texts are
    # The highest micro-F1 that the context allows; known of synthetic documents only.
    bound: float | None = None

    @property
    def shape(self) -> SequenceShape:
        """What a classifier is built for: the number of labels, tokens of a sample, and rows of the
        vocabulary."""
        return SequenceShape(
            len(self.label_names),
            next(iter(self.samples.values())).context,
            self.special.vocab_size,
        )

    def describe(self) -> str:
        """Return the source in a line: texts, tokenizer, labels and counts."""
        counts = ", ".join(f"{len(samples):,} {name}" for name, samples in self.samples.items())
        how = "" if self.tokenizer is None else f" | {self.tokenizer.describe()}"
        return f"{self.words}{how} | {len(self.label_names)} labels | {counts}"

    def prepare(self) -> None:
        """Do nothing: everything is in memory already."""

    def split(self, name: str) -> LabelledSamples:
        """Return the samples of a split."""
        return self.samples[name]

    @property
    def scored(self) -> str:
        """The name of the split on which a trained model is scored: "test", or
        "validation" if there is none."""
        return "test" if "test" in self.samples else "validation"


def make_source(
    settings: Settings,
    *,
    tokenizer: Tokenizer | None = None,
    label_names: Sequence[str] | None = None,
    only_test: bool = False,
) -> LabelledSource:
    """Read and tokenize the labelled texts that `finetune.*` names, cut to the context.

    Args:
        tokenizer: the tokenizer of trained weights; None: data.tokenizer; a "bpe" is trained
            on the training texts.
        label_names: the labels of a trained model; None: all labels of the train split.
        only_test: whether to read only texts to score: those of the test split or, if there is no
            such split, of all splits.

    Raises:
        UserError: there is nothing to read, or a text has a label that was not trained on.
    """
    own, data, context = settings.finetune, settings.data, settings.context
    if own.data not in ("files", "hub"):
        return component("documents", "synthetic")(own, context)
    rows = read_rows(own)
    if only_test:
        parts = {"test": rows.get("test") or [row for name in SPLITS for row in rows.get(name, [])]}
    else:
        check_trainable(rows, own)
        parts = _parts(rows, own)
    names = labels_in(rows["train"]) if label_names is None else label_names
    for row in (row for part in parts.values() for row in part):
        if own.target == "class" and len(row.labels) != 1:
            raise UserError(
                f"{row.where} has {len(row.labels)} labels, and finetune.target=class needs one "
                "each. Use finetune.target=labels for any number."
            )
    known = tokenizer
    if known is None:
        texts = (
            row.text if isinstance(row.text, str) else " ".join(row.text) for row in parts["train"]
        )
        spec = TokenizerSpec(
            data.tokenizer, data.vocab_size, data.vocab, data.merges, sample_bytes=sys.maxsize
        )
        known = make_tokenizer(spec, lambda: texts)
    of_words, special = own.target == "tokens", special_tokens(known)
    samples = {
        name: LabelledSamples(
            encode_rows(part, known, names, of_words=of_words), special, context, of_words=of_words
        )
        for name, part in parts.items()
        if part
    }
    words = f"texts of {own.path or ' '.join(filter(None, (own.name, own.config)))}"
    return LabelledSource(samples, tuple(names), special, known, words)


def train_count(own: FineTuningSettings) -> int:
    """Return how many texts of `finetune.path` are trained on."""
    rows = read_rows(own)
    check_trainable(rows, own)
    return len(_parts(rows, own)["train"])


def read_rows(own: FineTuningSettings) -> dict[str, list[Row]]:
    """Read the rows of each split of `finetune.path` or `finetune.name`.

    Files in a folder belong to the split in their names (see data.split_names), all
    other files to "train".

    Raises:
        UserError: there is nothing to read, or a line is broken.
    """
    own.check_data()
    of_words = own.target == "tokens"
    columns = Columns(
        own.words_column if of_words else own.text_column, own.labels_column, of_words
    )
    if own.data == "hub":
        return dataset_rows(
            str(own.name), own.config, columns, {split: getattr(own, split) for split in SPLITS}
        )
    path = Path(str(own.path)).expanduser()
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found: dict[str, list[Row]] = {}
    for file in files:
        if file.is_file() and file.name.endswith(SUFFIXES):
            split = (split_named(Path(file.name)) if path.is_dir() else None) or "train"
            found.setdefault(split, []).extend(file_rows(file, columns))
    if not any(found.values()):
        raise UserError(
            f"no labelled texts at {path}: "
            f"expected a {SUFFIXES[0]} or {SUFFIXES[-1]} file, or a folder."
        )
    return found


def check_trainable(rows: dict[str, list[Row]], own: FineTuningSettings) -> None:
    """Raise UserError if there are no rows to train on, or fewer labels than a classifier needs."""
    where = own.path or own.name
    if not rows.get("train"):
        present = " and ".join(name for name in SPLITS if rows.get(name)) or "no"
        raise UserError(
            f"no labelled texts to train on at {where}, only {present} texts. Add a train split."
        )
    names = labels_in(rows["train"])
    if len(names) < (1 if own.target == "labels" else 2):
        raise UserError(
            f"the texts to train on at {where} have {names or 'no labels'}, "
            f"and finetune.target={own.target} needs two labels or more."
        )


def _parts(rows: dict[str, list[Row]], own: FineTuningSettings) -> dict[str, list[Row]]:
    """Return the rows of each split, at most as many as finetune.train, .validation and .test say;
    without a split "validation" some rows of "train" are held out for it."""
    if "validation" not in rows:
        train = rows["train"]
        order = np.random.RandomState(0).permutation(len(train))
        held_out = max(1, round(own.validation_fraction * len(train)))
        if held_out >= len(train):
            raise UserError(
                f"{len(train)} labelled texts to train on are too few to hold out some. "
                "Expected 2 or more, or a split named validation."
            )
        rows = {
            **rows,
            "train": [train[number] for number in sorted(order[held_out:])],
            "validation": [train[number] for number in sorted(order[:held_out])],
        }
    return {name: rows[name][: getattr(own, name)] for name in SPLITS if name in rows}
