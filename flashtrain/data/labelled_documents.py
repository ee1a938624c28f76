"""Documents with labels, as a classifier is trained and tested on them: sources of them, and batches.

L labels, B documents of a batch, T packed tokens, S tokens of the longest padded row.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flashtrain.data.hub_source import datasets_library
from flashtrain.data.text_files import COMPRESSIONS, TextReader
from flashtrain.data.tokenizers import Tokenizer
from flashtrain.data.wordpiece import SpecialTokens
from flashtrain.errors import UserError, first_line
from flashtrain.files.hub import work_offline_where_unreachable


class LabelledDocuments(Protocol):
    """Documents by number; each has any of L labels."""

    label_names: tuple[str, ...]

    def __len__(self) -> int:
        """How many documents."""
        ...

    @property
    def lengths(self) -> np.ndarray:
        """(n,) int64: the tokens of each."""
        ...

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Its tokens, (length,) integers, and its labels, (L,) bool."""
        ...


class TokenDocuments(NamedTuple):
    """LabelledDocuments in memory. tokens: all of them end to end; offsets (n + 1,); labels (n, L) bool, or of texts
    whose words have labels as tokens, -100 for none."""

    tokens: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray
    label_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """(n,) int64."""
        return np.diff(self.offsets)

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels of one."""
        return self.tokens[self.offsets[number] : self.offsets[number + 1]], self.labels[number]


class ClassificationBatch(TypedDict, total=False):
    """Documents between [CLS] and [SEP], cut to the context; the names are those of models.SequenceClassifier.loss.

    Packed: tokens (T,) int64 and cu_seqlens (B + 1,) int32; what follows the last end is [PAD] and counts nowhere.
    Padded: tokens (B, S) int64 and lengths (B,) int64. labels (B, L) int64, 0 and 1.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    lengths: Tensor
    labels: Tensor


class CutSamples(Dataset[ClassificationBatch]):
    """What samples of documents share, whatever their labels: the checks, and how the rows of a batch are laid out.

    context: tokens of the longest sample, [CLS] and [SEP] included: of a longer document the first are read. Packed, a
    batch of B documents has B * context tokens, whatever their lengths, so that shapes stay the same.
    It goes with data.loader as PackedSamples does. UserError: a context below 3.
    """

    def __init__(
        self, documents: LabelledDocuments | TokenDocuments, special: SpecialTokens, context: int, layout: str
    ) -> None:
        if context < 3:
            raise UserError(f"context={context} must be at least 3: a token, [CLS] and [SEP].")
        self.special = special
        self.context = context
        self.layout = layout
        self.tokens = int(np.minimum(documents.lengths, context - 2).sum())
        self._count = len(documents)

    def __len__(self) -> int:
        return self._count

    def _batch(self, rows: Sequence[np.ndarray], labels: Tensor) -> ClassificationBatch:
        """The batch of these rows of tokens, [CLS] and [SEP] included."""
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        batch = ClassificationBatch(tokens=self._laid_out(rows, self.special.pad), labels=labels)
        if self.layout == "packed":
            batch["cu_seqlens"] = torch.from_numpy(np.concatenate(([0], lengths.cumsum())).astype(np.int32))
        else:
            batch["lengths"] = torch.from_numpy(lengths)
        return batch

    def _laid_out(self, rows: Sequence[np.ndarray], filler: int) -> Tensor:
        """Rows of whole numbers end to end and filled up to (B * context,), or below one another (B, S); int64."""
        flat = np.concatenate(rows).astype(np.int64)
        if self.layout == "packed":
            fill = len(rows) * self.context - len(flat)
            return torch.from_numpy(np.pad(flat, (0, fill), constant_values=filler))
        lengths = np.array([len(row) for row in rows])
        padded = np.full((len(rows), int(lengths.max())), filler, dtype=np.int64)
        padded[np.arange(padded.shape[1]) < lengths[:, None]] = flat
        return torch.from_numpy(padded)


class LabelledSamples(CutSamples):
    """LabelledDocuments as samples; indexed by a sequence of their numbers it gives one ClassificationBatch.

    context, layout, errors: see CutSamples.
    """

    def __init__(
        self, documents: LabelledDocuments, special: SpecialTokens, context: int, *, layout: str = "packed"
    ) -> None:
        super().__init__(documents, special, context, layout)
        self.documents = documents

    def __getitem__(self, numbers: Sequence[int]) -> ClassificationBatch:
        """The batch of these documents, in this order."""
        rows, labels = [], []
        for number in numbers:
            tokens, marks = self.documents.document(int(number))
            kept = tokens[: self.context - 2]
            rows.append(np.concatenate(([self.special.classify], kept, [self.special.separate])))
            labels.append(marks)
        return self._batch(rows, torch.from_numpy(np.array(labels).astype(np.int64)))


SUFFIXES = (".jsonl", *(f".jsonl{compression}" for compression in COMPRESSIONS))
ENCODED_AT_ONCE = 256


class MissingSplit(UserError):
    """A dataset that has no split of that name."""


class Row(NamedTuple):
    """A text and its labels' names; where it stands, in words."""

    text: str
    labels: list[str]
    where: str = ""


def labelled_rows(
    path: str | os.PathLike[str], *, text_column: str = "text", labels_column: str = "labels"
) -> list[Row]:
    """The rows of a .jsonl file, or of every such file in a folder in the order of their names (compressed ones too).

    A line is an object with a text (or a list of paragraphs, which are joined by line feeds) and a list of labels (or
    one alone): strings or whole numbers. UserError: nothing to read, and what is wrong in which line.
    """
    return [_row(row, where, text_column, labels_column) for row, where in jsonl_objects(path)]


def jsonl_objects(path: str | os.PathLike[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Each line's object, and where it stands in words, of such a file or folder. UserError: as labelled_rows."""
    path = Path(path).expanduser()
    files = sorted(p for p in path.iterdir() if p.name.endswith(SUFFIXES)) if path.is_dir() else [path]
    if not files or not files[0].is_file() or not files[0].name.endswith(SUFFIXES):
        raise UserError(f"no labelled documents at {path}. Possible: a {SUFFIXES[0]} file, or a folder with some.")
    for file in files:
        for where, row in TextReader().rows(file):
            yield row, where


def dataset_rows(
    name: str,
    config: str | None = None,
    split: str = "train",
    *,
    text_column: str = "text",
    labels_column: str = "labels",
    most: int | None = None,
) -> list[Row]:
    """The rows of one split of a dataset of the Hugging Face hub, or of a local folder that `datasets` can load.

    Numbered labels get the names that the dataset gives them. most: the first so many rows only.
    dataset_rows("coastalcph/lex_glue", "ecthr_a") is the task of Dao et al. 2022, table 5: articles of the Convention,
    from the facts of a case.
    UserError: `datasets` is not installed, no such split, columns that are not there; and what `datasets` raises.
    """
    if not Path(name).is_dir():
        work_offline_where_unreachable()
    library = datasets_library()
    where = f"dataset {name}{f' {config}' if config else ''}, split {split}"
    try:
        table = library.load_dataset(name, config, split=split)
    except ValueError as error:
        if "unknown split" not in str(error).lower():
            raise
        raise MissingSplit(f"cannot load {where}: {first_line(error)}.") from error
    rows = islice(table, most)
    feature = (table.features or {}).get(labels_column)
    inner = getattr(feature, "feature", feature)
    found = [_row(row, f"{where}, row {number}", text_column, labels_column) for number, row in enumerate(rows)]
    names = getattr(inner, "names", None)
    if names is None:
        return found
    return [row._replace(labels=[names[int(label)] for label in row.labels]) for row in found]


def encode_rows(rows: Sequence[Row], tokenizer: Tokenizer, label_names: Sequence[str] | None = None) -> TokenDocuments:
    """The documents as tokens. label_names: in the order of the labels (None: all that occur, sorted).

    UserError: no rows, a label that is not among the names: a test set's labels must all be known from training.
    """
    if not rows:
        raise UserError("there are no labelled documents.")
    names = tuple(sorted({label for row in rows for label in row.labels}) if label_names is None else label_names)
    place = {name: number for number, name in enumerate(names)}
    marks = np.zeros((len(rows), len(names)), dtype=bool)
    for number, row in enumerate(rows):
        for label in row.labels:
            if label not in place:
                raise unknown_label(label, row.where, number, names)
            marks[number, place[label]] = True
    encoded = list(_encoded((row.text for row in rows), tokenizer))
    offsets = np.cumsum([0, *(len(tokens) for tokens in encoded)])
    return TokenDocuments(np.concatenate(encoded).astype(np.uint32), offsets, marks, names)


def unknown_label(label: str, where: str, number: int, names: Sequence[str]) -> UserError:
    """The error of a row, the one of this number, with a label that is not among the names."""
    possible = ", ".join(names) or "none"
    return UserError(f"{where or f'document {number}'} has the label '{label}'. Possible: {possible}.")


def _encoded(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    iterator = iter(texts)
    while some := list(islice(iterator, ENCODED_AT_ONCE)):
        yield from tokenizer.encode_batch(some)


def _row(row: dict[str, Any], where: str, text_column: str, labels_column: str) -> Row:
    for column in (text_column, labels_column):
        if column not in row:
            raise UserError(f"{where}: no column '{column}'. Possible: {', '.join(row) or 'none'}.")
    text, labels = row[text_column], row[labels_column]
    if isinstance(text, list) and all(isinstance(part, str) for part in text):
        text = "\n".join(text)
    if not isinstance(text, str):
        raise UserError(f"{where}: '{text_column}' holds no text. Possible: a string, or a list of strings.")
    labels = labels if isinstance(labels, list) else [labels]
    if not all(isinstance(label, str | int) and not isinstance(label, bool) for label in labels):
        raise UserError(f"{where}: '{labels_column}' holds {labels!r:.60}. Possible: strings or whole numbers.")
    return Row(text, [str(label) for label in labels], where)
