"""Texts with a label for each word: .jsonl lines {"words": [...], "labels": [...]}, and their samples.

T packed tokens, B padded rows, S the longest of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flashtrain.data.batch import IGNORED_LABEL
from flashtrain.data.labelled_documents import ClassificationBatch, CutSamples
from flashtrain.data.labelled_files import MOST_BYTES, jsonl_objects, unknown_label
from flashtrain.data.special_tokens import SpecialTokens
from flashtrain.data.tokenizers import Tokenizer
from flashtrain.errors import UserError


class WordRow(NamedTuple):
    """Words and a label's name for each; where they stand, in words."""

    words: list[str]
    labels: list[str]
    where: str = ""


class LabelledTokens(NamedTuple):
    """Texts in memory. tokens: all of them end to end; offsets (n + 1,); labels: as tokens, -100 for none."""

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


def word_rows(
    path: str | os.PathLike[str], *, words_column: str = "words", labels_column: str = "labels"
) -> list[WordRow]:
    """The rows of a .jsonl file, or of every such file in a folder in the order of their names.

    UserError: nothing to read, and what is wrong in which line: a column missing, no two lists of one length.
    """
    rows = []
    for row, where in jsonl_objects(path, most=MOST_BYTES):
        for column in (words_column, labels_column):
            given = row.get(column)
            if not isinstance(given, list) or not all(isinstance(one, str | int) for one in given):
                raise UserError(f"{where}: '{column}' is no list of strings. Possible: one for each word.")
        words, labels = (list(map(str, row[column])) for column in (words_column, labels_column))
        if len(words) != len(labels) or not words:
            raise UserError(f"{where}: {len(words)} words and {len(labels)} labels. Possible: one label for each word.")
        rows.append(WordRow(words, labels, where))
    return rows


def encode_words(
    rows: Sequence[WordRow], tokenizer: Tokenizer, label_names: Sequence[str] | None = None
) -> LabelledTokens:
    """The texts as tokens, a word's label at its first token (Devlin et al. 2019, section 5.3).

    Every word but the first is encoded with a space before it. label_names: None for all that occur, sorted.
    UserError: no rows, a label that is not among the names.
    """
    if not rows:
        raise UserError("there are no labelled texts.")
    names = tuple(sorted({one for row in rows for one in row.labels}) if label_names is None else label_names)
    place = {name: number for number, name in enumerate(names)}
    tokens: list[int] = []
    labels: list[int] = []
    sizes = [0]
    for number, row in enumerate(rows):
        before = len(tokens)
        encoded = tokenizer.encode_batch([word if not at else f" {word}" for at, word in enumerate(row.words)])
        for ids, mark in zip(encoded, row.labels, strict=True):
            if mark not in place:
                raise unknown_label(mark, row.where, number, names)
            tokens.extend(int(token) for token in ids)
            if len(ids):
                labels.extend([place[mark], *[IGNORED_LABEL] * (len(ids) - 1)])
        sizes.append(len(tokens) - before)
    return LabelledTokens(np.array(tokens), np.cumsum(sizes), np.array(labels), names)


class TokenLabelledSamples(CutSamples):
    """LabelledTokens as samples; indexed by a sequence of their numbers it gives one batch for TokenClassifier.loss.

    As LabelledSamples', but `labels` are as `tokens` are, int64, -100 where there is none. context, layout, errors: see
    CutSamples.
    """

    def __init__(self, texts: LabelledTokens, special: SpecialTokens, context: int, *, layout: str = "packed") -> None:
        super().__init__(texts, special, context, layout)
        self.texts = texts

    def __getitem__(self, numbers: Sequence[int]) -> ClassificationBatch:
        """The batch of these texts, in this order."""
        rows, marks = [], []
        for number in numbers:
            begin = self.texts.offsets[number]
            end = min(self.texts.offsets[number + 1], begin + self.context - 2)
            kept, none = self.texts.tokens[begin:end], [IGNORED_LABEL]
            rows.append(np.concatenate(([self.special.classify], kept, [self.special.separate])))
            marks.append(np.concatenate((none, self.texts.labels[begin:end], none)))
        return self._batch(rows, self._laid_out(marks, IGNORED_LABEL))
