"""Retrieval of the Long Range Arena: does one of two papers cite the other? (ACL Anthology Network; Radev et al. 2013.)

Both are read byte by byte, by the same encoder.
"""

from __future__ import annotations

import os
from pathlib import Path

from flashtrain.data.sequences import ArraySource, Sequences, SequenceSamples, SequenceShape
from flashtrain.data.text_files import decode_text
from flashtrain.errors import UserError
from flashtrain_recipes.arena.array_cache import open_or_build
from flashtrain_recipes.arena.sequence_rows import ByteSequences, fingerprint

VERSION = 1
LENGTH = 4000  # the Arena's, of each text
LONGEST_LINE = 2**24  # bytes of a pair
LOOKED_AT = 2**20  # bytes of a file, whether they are text
COLUMNS = 5  # label, id1, id2, text1, text2
_NAMES = {"train": "train", "validation": "eval", "test": "test"}  # as the Arena's files have them


class Retrieval(ArraySource):
    """path: a folder with new_aan_pairs.train.tsv, .eval.tsv and .test.tsv (any names that end so; several are read in
    the order of their names), each line: label, two ids, two texts, by tabs; the label is 0 or 1. UserError: not found,
    or lines of another form.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        length: int = LENGTH,
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
        key = f"retrieval-{fingerprint(files)}-{self.length}-v{VERSION}"
        return SequenceSamples(
            open_or_build(key, lambda: self._read(files), self.cache_dir, self.shape), self.length, fixed=self.fixed
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
            _add(pairs, file)
        return pairs.finish()


def _add(pairs: ByteSequences, file: Path) -> None:
    with file.open("rb") as lines:
        decode_text(lines.read(LOOKED_AT), file, remedy="pairs are UTF-8.")
        lines.seek(0)
        number = 0
        while line := lines.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise UserError(f"{file}:{number}: a line of more than {LONGEST_LINE:,} bytes.")
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
