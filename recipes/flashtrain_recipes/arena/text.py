"""Text of the Long Range Arena: is a film review (IMDB; Maas et al. 2011) favourable? Read byte by byte."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from flashtrain.data.sequences import ArraySource, Sequences, SequenceSamples, SequenceShape
from flashtrain.data.text_files import decode_text
from flashtrain.errors import UserError
from flashtrain.files.foreign_files import read_bytes
from flashtrain_recipes.arena.array_cache import open_or_build
from flashtrain_recipes.arena.sequence_rows import (
    ByteSequences,
    find_table,
    fingerprint,
    held_out,
    hub_rows,
    local_rows,
    value_of,
)

VERSION = 1
LENGTH = 4096  # the Arena's
LONGEST_REVIEW = 2**24  # bytes of a .txt file
HELD_OUT = 2000  # training reviews that validate: the data set has no split for it
_SENTIMENTS = {"neg": 0, "pos": 1}


class ByteText(ArraySource):
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
        length: int = LENGTH,
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
                f"text-{key}-{part}-{self.length}-v{VERSION}", lambda: self._from_hub(part), self.cache_dir, self.shape
            )
        if not self.path.is_dir():
            raise UserError(f"sequence.path={self.path} is no folder (seen from {Path.cwd()}).")
        files = self._files(part)
        name = f"text-{fingerprint(files)}-{part}-{self.length}-v{VERSION}"
        return open_or_build(name, lambda: self._from_files(files), self.cache_dir, self.shape)

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
                found.add(_SENTIMENTS[path.parent.name], _review(path))
                continue
            for row, where in local_rows(path):
                _add(found, row, where)
        return found.finish()

    def _from_hub(self, part: str) -> Sequences:
        found = ByteSequences(self.length)
        for row in hub_rows(str(self.name), part):
            _add(found, row, str(self.name))
        return found.finish()


def _shuffled(part: Sequences) -> Sequences:
    """The part in one random order, so that its first rows are of both kinds."""
    count = len(part.labels)
    order = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((0, 9)))).permutation(count)
    return part.chosen(order)


def _review(path: Path) -> bytes:
    """A review's bytes, as they are: the model reads bytes. UserError: they are no text."""
    content = read_bytes(path, LONGEST_REVIEW)
    decode_text(content, path, remedy="reviews are UTF-8.")
    return content


def _add(found: ByteSequences, row: object, where: str) -> None:
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row is no object with fields.")
    label = value_of(row, ("label", "sentiment"), where)
    label = _SENTIMENTS.get(str(label)[:3], label)
    if label not in (0, 1):
        raise UserError(f"{where}: the label {label!r} is neither 0 (unfavourable) nor 1 (favourable).")
    found.add(int(label), str(value_of(row, ("text", "review"), where)))
