"""Read labelled texts from files and datasets: any number of labels per text,
or one label per word."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashtrain.data.hub_source import datasets_library
from flashtrain.data.labelled_documents import LabelledTexts
from flashtrain.data.split_names import NAMES
from flashtrain.data.text_files import COMPRESSIONS, TextReader
from flashtrain.data.tokenizers import Tokenizer
from flashtrain.errors import UserError
from flashtrain_kernels.loss_head import IGNORED

SUFFIXES = (".jsonl", *(f".jsonl{compression}" for compression in COMPRESSIONS), ".parquet")


class Columns(NamedTuple):
    """The names of the columns that hold texts and labels."""

    text: str = "text"
    labels: str = "labels"
    of_words: bool = False  # whether a text is a list of words, with a list of as many labels


class Row(NamedTuple):
    """A text with its labels, as a file or dataset has them, and a text that says where the row
    stands (file and line)."""

    text: str | list[str]  # or its words
    labels: list[str]  # their names
    where: str = ""  # file and line


def file_rows(path: Path, columns: Columns) -> list[Row]:
    """Read the rows of a .jsonl file (also compressed) or a .parquet file.

    A text may be a list of paragraphs, which are joined by line feeds. Labels are strings or
    integers, one or a list. Raises UserError, which names the row, if a row cannot be read.
    """
    return [_row(row, where, columns) for where, row in TextReader().rows(path)]


def dataset_rows(
    name: str, config: str | None, columns: Columns, max_rows: dict[str, int | None] | None = None
) -> dict[str, list[Row]]:
    """Read the rows of each split of a dataset of the Hugging Face hub, or of a local folder
    that `datasets` can load.

    Numbered labels get the dataset's names for them. For example,
    dataset_rows("coastalcph/lex_glue", "ecthr_a", Columns()) is the task of Dao et al. 2022, table
    5: articles of the Convention, from the facts of a case.

    Args:
        name: Name on the hub, or the folder.
        config: The dataset's configuration, if it has several.
        columns: Which columns to read.
        max_rows: For each split, how many of its first rows to read (None: all).

    Raises:
        UserError: `datasets` is not installed, or a column is missing. Whatever
            `datasets` raises is passed on.
    """
    tables = datasets_library().load_dataset(name, config)
    found = {}
    for split, names in NAMES.items():
        called = next((called for called in names if called in tables), None)
        if called is None:
            continue
        table = tables[called]
        where = f"dataset {' '.join(filter(None, (name, config)))}, split {called}"
        feature = table.features.get(columns.labels)
        label_names = getattr(getattr(feature, "feature", feature), "names", None)
        rows = islice(table, (max_rows or {}).get(split))
        found[split] = [
            _row(row, f"{where}, row {number}", columns) for number, row in enumerate(rows)
        ]
        if label_names is not None:
            found[split] = [
                row._replace(labels=[label_names[int(one)] for one in row.labels])
                for row in found[split]
            ]
    return found


def labels_in(rows: Iterable[Row]) -> tuple[str, ...]:
    """List the distinct label names of rows, sorted."""
    return tuple(sorted({label for row in rows for label in row.labels}))


def encode_rows(
    rows: Sequence[Row], tokenizer: Tokenizer, label_names: Sequence[str], *, of_words: bool = False
) -> LabelledTexts:
    """Encode rows as tokens and label numbers.

    Args:
        label_names: The names of all labels, from the training rows; a label's number is its index.
        of_words: Encode word by word, with a space before every word but the first; a word's label
            is put at its first token (Devlin et al. 2019, section 5.3).

    Raises:
        UserError: A row has a label that is not in `label_names`.
    """
    place = {name: number for number, name in enumerate(label_names)}
    for row in rows:
        for label in row.labels:
            if label not in place:
                raise UserError(
                    f"{row.where} has the label '{label}': expected {', '.join(label_names)}."
                )
    marks = [np.array([place[label] for label in row.labels], dtype=np.int64) for row in rows]
    if not of_words:
        tokens = tokenizer.encode_batch([str(row.text) for row in rows])
        labels = [np.isin(np.arange(len(place)), numbers) for numbers in marks]
        return LabelledTexts(tokens, labels, tuple(label_names))
    tokens, labels = [], []
    for row, numbers in zip(rows, marks, strict=True):
        words = tokenizer.encode_batch(
            [f" {word}" if at else word for at, word in enumerate(row.text)]
        )
        lengths = np.array([len(word) for word in words])
        tokens.append(np.concatenate(words))
        labels.append(np.full(lengths.sum(), IGNORED))
        labels[-1][(lengths.cumsum() - lengths)[lengths > 0]] = numbers[lengths > 0]
    return LabelledTexts(tokens, labels, tuple(label_names))


def _row(row: dict[str, Any], where: str, columns: Columns) -> Row:
    for column in columns[:2]:
        if column not in row:
            raise UserError(
                f"{where}: no column '{column}', expected one of {', '.join(row) or 'some'} "
                "(finetune.text_column, words_column, labels_column)."
            )
    text, labels = row[columns.text], row[columns.labels]
    labels = labels if isinstance(labels, list) else [labels]
    if not all(isinstance(label, str | int) and not isinstance(label, bool) for label in labels):
        raise UserError(
            f"{where}: '{columns.labels}' holds {labels!r:.60}, expected strings or whole numbers."
        )
    strings = isinstance(text, list) and all(isinstance(part, str | int) for part in text)
    if not strings and (columns.of_words or not isinstance(text, str)):
        raise UserError(
            f"{where}: '{columns.text}' holds {text!r:.60}, expected a text or a list of strings."
        )
    if columns.of_words and (len(text) != len(labels) or not text):
        raise UserError(
            f"{where}: "
            f"{len(text)} words and {len(labels)} labels, expected one label for each word."
        )
    if strings:
        text = [str(part) for part in text] if columns.of_words else "\n".join(map(str, text))
    return Row(text, [str(label) for label in labels], where)
