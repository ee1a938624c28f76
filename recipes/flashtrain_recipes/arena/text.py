"""Byte text of the Long Range Arena, both read byte by byte: film reviews and pairs of papers.

Text: is a film review (IMDB; Maas et al. 2011) favourable? Retrieval: does one of two papers cite the other (ACL
Anthology Network; Radev et al. 2013)? The same encoder reads both papers.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from flashtrain.data.sequences import Sequences, SequenceSamples, SequenceShape
from flashtrain.errors import UserError
from flashtrain_recipes.arena.sequence_rows import (
    ByteSequences,
    Row,
    find_table,
    fingerprint,
    held_out,
    hub_rows,
    local_rows,
    open_or_build,
    value_of,
)

REVIEWS_VERSION = 1
REVIEW_LENGTH = 4096  # the Arena's
HELD_OUT = 2000  # training reviews that validate: the data set has no split for it
_SENTIMENTS = {"neg": 0, "pos": 1}


class ByteText:
    """path: the folder aclImdb (train/pos, train/neg, test/pos, test/neg, a .txt a review), or one with train.jsonl and
    test.jsonl (or .parquet; several files that begin so are read in the order of their names), rows with `text` and
    `label` (0 or 1). name: instead, a dataset that `datasets` loads, with such rows, such as stanfordnlp/imdb.
    validation: training reviews held out, drawn by `seed`. UserError: neither or not found.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        name: str | None = None,
        *,
        length: int = REVIEW_LENGTH,
        validation: int | None = None,
        seed: int = 0,
        fixed: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if path is None and not name:
            raise UserError(
                "sequence.data=text is read from disk: sequence.path=FOLDER with aclImdb (train/pos, ...) or "
                "train.jsonl and test.jsonl, or sequence.name=stanfordnlp/imdb through `datasets`."
            )
        self.path = None if path is None else Path(path).expanduser()
        self.name, self.length, self.seed, self.fixed, self.cache_dir = name, length, seed, fixed, cache_dir
        self.validation = HELD_OUT if validation is None else validation
        self._parts: dict[str, Sequences] = {}

    @property
    def shape(self) -> SequenceShape:
        return SequenceShape(classes=2, length=self.length)

    def describe(self) -> str:
        return f"film reviews in {self.path or self.name}, up to {self.length:,} bytes"

    def prepare(self) -> None:
        """Read what is not in the cache."""
        if self._parts:
            return
        found = {name: self._opened(name) for name in ("train", "test")}
        kept, out = held_out(len(found["train"].labels), self.validation, self.seed)
        self._parts = {
            "train": found["train"].chosen(kept),
            "validation": _shuffled(found["train"].chosen(out)),
            "test": _shuffled(found["test"]),
        }

    def split(self, name: str) -> SequenceSamples:
        """One of "train", "validation", "test"."""
        self.prepare()
        return SequenceSamples(self._parts[name], self.length, fixed=self.fixed)

    def _opened(self, part: str) -> Sequences:
        if self.path is None:
            key = str(self.name).replace("/", "--")
            return open_or_build(
                f"text-{key}-{part}-{self.length}-v{REVIEWS_VERSION}",
                lambda: self._from_hub(part),
                self.cache_dir,
            )
        if not self.path.is_dir():
            raise UserError(f"sequence.path={self.path} is no folder (seen from {Path.cwd()}).")
        files = self._files(part)
        name = f"text-{fingerprint(files)}-{part}-{self.length}-v{REVIEWS_VERSION}"
        return open_or_build(name, lambda: self._from_files(files), self.cache_dir)

    def _files(self, part: str) -> list[Path]:
        folder = self.path or Path()
        inner = folder / "aclImdb" if (folder / "aclImdb").is_dir() else folder
        reviews = [path for name in _SENTIMENTS for path in sorted((inner / part / name).glob("*.txt"))]
        if reviews:
            return reviews
        tables = find_table(folder, part)
        if not tables:
            raise UserError(
                f"{folder} has neither {part}/pos and {part}/neg with .txt reviews nor {part}.jsonl or .parquet."
            )
        return tables

    def _from_files(self, files: list[Path]) -> Sequences:
        found = ByteSequences(self.length)
        for path in files:
            if path.suffix == ".txt":
                found.add(_SENTIMENTS[path.parent.name], path.read_bytes())
                continue
            for row, where in local_rows(path):
                _add_review(found, row, where)
        return found.finish()

    def _from_hub(self, part: str) -> Sequences:
        found = ByteSequences(self.length)
        for row in hub_rows(str(self.name), part):
            _add_review(found, row, str(self.name))
        return found.finish()


def _shuffled(part: Sequences) -> Sequences:
    """The part in one random order, so that its first rows are of both kinds."""
    count = len(part.labels)
    order = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((0, 9)))).permutation(count)
    return part.chosen(order)


def _add_review(found: ByteSequences, row: Row, where: str) -> None:
    label = value_of(row, ("label", "sentiment"), where)
    label = _SENTIMENTS.get(str(label)[:3], label)
    if label not in (0, 1):
        raise UserError(f"{where}: the label {label!r} is neither 0 (unfavourable) nor 1 (favourable).")
    found.add(int(label), str(value_of(row, ("text", "review"), where)))


PAIRS_VERSION = 1
PAPER_LENGTH = 4000  # the Arena's, of each text
COLUMNS = 5  # label, id1, id2, text1, text2
_NAMES = {"train": "train", "validation": "eval", "test": "test"}  # as the Arena's files have them


class Retrieval:
    """path: a folder with new_aan_pairs.train.tsv, .eval.tsv and .test.tsv (any names that end so; several are read in
    the order of their names), each line: label, two ids, two texts, by tabs; the label is 0 or 1. UserError: not found,
    or lines of another form.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        length: int = PAPER_LENGTH,
        fixed: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if path is None:
            raise UserError(
                "sequence.data=retrieval is read from disk: sequence.path=FOLDER with the Long Range Arena's "
                "new_aan_pairs.train.tsv, new_aan_pairs.eval.tsv and new_aan_pairs.test.tsv."
            )
        self.path = Path(path).expanduser()
        self.length, self.fixed, self.cache_dir = length, fixed, cache_dir

    @property
    def shape(self) -> SequenceShape:
        return SequenceShape(classes=2, length=self.length, towers=2)

    def describe(self) -> str:
        return f"pairs of papers in {self.path}, up to {self.length:,} bytes each"

    def prepare(self) -> None:
        """Read what is not in the cache."""
        for name in _NAMES:
            self.split(name)

    def split(self, name: str) -> SequenceSamples:
        """One of "train", "validation", "test"."""
        files = self._files(name)
        key = f"retrieval-{fingerprint(files)}-{self.length}-v{PAIRS_VERSION}"
        return SequenceSamples(
            open_or_build(key, lambda: self._read(files), self.cache_dir), self.length, fixed=self.fixed
        )

    def _files(self, split: str) -> list[Path]:
        if not self.path.is_dir():
            raise UserError(f"sequence.path={self.path} is no folder (seen from {Path.cwd()}).")
        found = sorted(self.path.glob(f"*{_NAMES[split]}.tsv"))
        if not found:
            raise UserError(f"{self.path} has no file that ends in {_NAMES[split]}.tsv.")
        return found

    def _read(self, files: list[Path]) -> Sequences:
        pairs = ByteSequences(self.length)
        for file in files:
            _add_pairs(pairs, file)
        return pairs.finish()


def _add_pairs(pairs: ByteSequences, file: Path) -> None:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            fields = line.rstrip(b"\r\n").split(b"\t")
            if len(fields) != COLUMNS:
                raise UserError(f"{file}:{number}: {len(fields)} fields by tabs, not label, id1, id2, text1, text2.")
            try:
                label = float(fields[0])
            except ValueError:
                label = -1
            if label not in (0, 1):
                raise UserError(f"{file}:{number}: the label is neither 0 nor 1.")
            pairs.add(int(label), fields[3], fields[4])
