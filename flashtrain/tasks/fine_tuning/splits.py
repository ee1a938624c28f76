"""The labelled texts of a run: which are trained on, which validate, which test; as samples of the context's length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from flashtrain.data.bpe import BPETokenizer, gpt2_tokenizer
from flashtrain.data.labelled_documents import (
    SUFFIXES,
    LabelledDocuments,
    LabelledSamples,
    MissingSplit,
    dataset_rows,
    encode_rows,
    labelled_rows,
)
from flashtrain.data.labelled_examples import CueDocuments, TokenLabelledSamples, best_micro_f1, encode_words, word_rows
from flashtrain.data.sequences import ArraySource, SequenceShape
from flashtrain.data.split_names import NAMES, split_named
from flashtrain.data.tokenizers import ByteTokenizer, Tokenizer, huggingface_tokenizer
from flashtrain.data.wordpiece import SpecialTokens
from flashtrain.errors import UserError
from flashtrain.settings.groups import DataSettings
from flashtrain.tasks.masked_language.build import special_tokens

if TYPE_CHECKING:
    from flashtrain.tasks.fine_tuning.spec import FineTuningSettings

SPLITS = ("train", "validation", "test")
CUE_COUNTS = {"train": 100_000, "validation": 500, "test": 2000}


class CountedSamples(Dataset[dict[str, Any]]):
    """LabelledSamples or TokenLabelledSamples with plain numbers in each batch: real_tokens, pairs, sequences."""

    def __init__(self, samples: LabelledSamples | TokenLabelledSamples) -> None:
        self.samples = samples
        self.context = samples.context
        self.tokens = samples.tokens

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, numbers: Sequence[int]) -> dict[str, Any]:
        batch: dict[str, Any] = dict(self.samples[numbers])
        lengths = batch["lengths"] if "lengths" in batch else batch["cu_seqlens"].diff().long()
        numbers_of = {"real_tokens": lengths.sum(), "pairs": (lengths * lengths).sum()}
        return {**batch, **{name: int(value) for name, value in numbers_of.items()}, "sequences": len(lengths)}


@dataclass
class LabelledSource(ArraySource):
    """The samples of each split, as SequenceDataModule reads them. test: missing where there is none.

    bound: the most micro-F1 that a reader of the context can expect, known of made-up documents only. tokenizer: of
    texts; None of made-up documents.
    """

    samples: dict[str, CountedSamples]
    label_names: tuple[str, ...]
    special: SpecialTokens
    tokenizer: Tokenizer | None
    words: str
    bound: float | None = None

    @property
    def shape(self) -> SequenceShape:
        """Classes, longest sample, tokens."""
        return SequenceShape(len(self.label_names), next(iter(self.samples.values())).context, self.special.vocab_size)

    def describe(self) -> str:
        """In a line: what, how many."""
        counts = ", ".join(f"{len(samples):,} {name}" for name, samples in self.samples.items())
        how = "" if self.tokenizer is None else f" | {self.tokenizer.describe()}"
        return f"{self.words}{how} | {len(self.label_names)} labels | {counts}"

    def prepare(self) -> None:
        """Everything is in memory already."""

    def split(self, name: str) -> Any:
        """The samples of a split."""
        return self.samples[name]

    @property
    def scored(self) -> str:
        """The split that a trained model is scored on: test, or validation where there is none."""
        return "test" if "test" in self.samples else "validation"


def make_source(
    asked: FineTuningSettings,
    data: DataSettings,
    context: int,
    *,
    tokenizer: Tokenizer | None = None,
    label_names: Sequence[str] | None = None,
    only_test: bool = False,
) -> LabelledSource:
    """The texts that `finetune.*` names, cut to the context.

    tokenizer: of trained weights (None: data.tokenizer, a bpe trained on the training texts). label_names: of a trained
    model (None: those of the texts to train on, before some are held out). only_test: whether none are trained on: the
    test texts alone, or all where none are called so. UserError: nothing to read, labels that were not trained on.
    """
    asked.check_data()
    if asked.data == "cues":
        return _cues(asked, context)
    rows = read_rows(asked)
    if only_test:
        parts = {"test": rows.get("test") or [row for name in SPLITS for row in rows.get(name, [])]}
    else:
        check_trainable(rows, asked)
        parts = _parts(rows, asked)
    known = tokenizer or _tokenizer(data, parts["train"])
    names = tuple(label_names) if label_names is not None else _names_in(rows["train"])
    if asked.target == "class":
        _check_single(parts)
    special = special_tokens(known)
    encode: Callable[..., Any] = encode_words if asked.target == "tokens" else encode_rows
    kind: Callable[..., Any] = TokenLabelledSamples if asked.target == "tokens" else LabelledSamples
    samples = {
        name: CountedSamples(kind(encode(part, known, names), special, context, layout=asked.layout))
        for name, part in parts.items()
        if part
    }
    words = f"texts of {asked.path or ' '.join(filter(None, (asked.name, asked.config)))}"
    return LabelledSource(samples, names, special, known, words)


def read_rows(asked: FineTuningSettings) -> dict[str, list[Any]]:
    """The rows of each split that `finetune.path` or `finetune.name` has. UserError: nothing to read, a bad line."""
    asked.check_data()
    return _token_rows(asked) if asked.target == "tokens" else _text_rows(asked)


def check_trainable(rows: dict[str, list[Any]], asked: FineTuningSettings) -> None:
    """UserError where there are no rows to train on, or too few labels to tell apart."""
    where = asked.path or asked.name
    if not rows.get("train"):
        held = " and ".join(name for name in SPLITS if rows.get(name)) or "no"
        raise UserError(f"there are no labelled texts to train on at {where}: {held} texts alone.")
    names = _names_in(rows["train"])
    if len(names) < (1 if asked.target == "labels" else 2):
        raise UserError(
            f"all texts to train on at {where} have the label {names[0]}: finetune.target={asked.target} tells two or "
            "more apart."
            if names
            else f"no text to train on at {where} has a label."
        )


def _cues(asked: FineTuningSettings, context: int) -> LabelledSource:
    """Made-up documents: each split from a seed of its own."""
    documents: dict[str, LabelledDocuments] = {
        name: CueDocuments(
            getattr(asked, name) or CUE_COUNTS[name],
            asked.length,
            shortest=asked.shortest,
            labels=asked.labels,
            presence=asked.presence,
            seed=len(SPLITS) * asked.seed + number,
        )
        for number, name in enumerate(SPLITS)
    }
    test = documents["test"]
    special = SpecialTokens.past(test.vocab_size)  # type: ignore[attr-defined]
    samples = {
        name: CountedSamples(LabelledSamples(part, special, context, layout=asked.layout))
        for name, part in documents.items()
    }
    bound = best_micro_f1(test.lengths, context - 2, asked.presence)
    words = f"made-up documents of {asked.shortest or asked.length:,} to {asked.length:,} tokens with cues"
    return LabelledSource(samples, test.label_names, special, None, words, bound)


def _text_rows(asked: FineTuningSettings) -> dict[str, list[Any]]:
    read = partial(labelled_rows, text_column=asked.text_column, labels_column=asked.labels_column)
    if asked.data == "files":
        return _files(str(asked.path), read)
    found: dict[str, list[Any]] = {}
    for name, possible in NAMES.items():
        for split in possible:
            try:
                found[name] = dataset_rows(
                    str(asked.name),
                    asked.config,
                    split,
                    text_column=asked.text_column,
                    labels_column=asked.labels_column,
                    most=getattr(asked, name),
                )
                break
            except MissingSplit:
                if name == "train":
                    raise
    return found


def _token_rows(asked: FineTuningSettings) -> dict[str, list[Any]]:
    read = partial(word_rows, words_column=asked.words_column, labels_column=asked.labels_column)
    return _files(str(asked.path), read)


def _files(given: str, read: Callable[[Path], list[Any]]) -> dict[str, list[Any]]:
    """The rows of a folder's files by split (split_names). Where none is named train, all that have no such name are to
    train on, and so is a file alone."""
    path = Path(given).expanduser()
    files = [file for file in sorted(path.iterdir()) if file.name.endswith(SUFFIXES)] if path.is_dir() else []
    if not files:
        return {"train": read(path)}
    named = {split: [file for file in files if split_named(Path(file.name)) == split] for split in SPLITS}
    if not named["train"]:
        others = {file for found in named.values() for file in found}
        named["train"] = [file for file in files if file not in others]
    return {split: [row for file in found for row in read(file)] for split, found in named.items() if found}


def _parts(rows: dict[str, list[Any]], asked: FineTuningSettings) -> dict[str, list[Any]]:
    """The rows of each split, the first so many as are asked for; validation drawn from training where it has none."""
    if "validation" not in rows:
        train = rows["train"]
        order = np.random.RandomState(asked.seed).permutation(len(train))
        held_out = max(1, round(asked.validation_fraction * len(train)))
        if held_out >= len(train):
            raise UserError(f"{len(train)} labelled texts are too few to hold out some. Possible: 2 or more.")
        rows = {
            **rows,
            "train": [train[number] for number in sorted(order[held_out:])],
            "validation": [train[number] for number in sorted(order[:held_out])],
        }
    return {name: rows[name][: getattr(asked, name)] for name in SPLITS if name in rows}


def _tokenizer(data: DataSettings, rows: Sequence[Any]) -> Tokenizer:
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    if data.tokenizer == "gpt2":
        return gpt2_tokenizer(vocab=data.vocab, merges=data.merges)
    if data.tokenizer != "bpe":
        return huggingface_tokenizer(data.tokenizer)
    texts = (row[0] if isinstance(row[0], str) else " ".join(row[0]) for row in rows)
    return BPETokenizer.train(texts, data.vocab_size)


def _names_in(rows: Sequence[Any]) -> tuple[str, ...]:
    return tuple(sorted({label for row in rows for label in row.labels}))


def _check_single(parts: dict[str, list[Any]]) -> None:
    for name, rows in parts.items():
        for number, row in enumerate(rows):
            if len(row.labels) != 1:
                where = row.where or f"{name} text {number}"
                raise UserError(
                    f"{where} has {len(row.labels)} labels, and finetune.target=class has one each: "
                    "finetune.target=labels takes any number."
                )
