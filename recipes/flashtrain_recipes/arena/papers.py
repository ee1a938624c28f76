"""The Arena's task Retrieval: whether one of two papers cites the other (ACL Anthology
Network; Radev et al. 2013).

One encoder reads both papers, byte by byte.
"""

from __future__ import annotations

from pathlib import Path

from flashtrain.data.sequences import SequenceShape
from flashtrain.errors import UserError
from flashtrain_recipes.arena.byte_sequences import ByteSequences, FileSource
from flashtrain_recipes.arena.sequence_samples import Sequences

LENGTH = 4000  # the Arena's, of each text
_NAMES = {"train": "train", "validation": "eval", "test": "test"}  # as the Arena's files have them
_LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}


class PaperPairs(FileSource):
    """Pairs of papers, read from files.

    Args:
        path: a folder with new_aan_pairs.train.tsv, .eval.tsv and .test.tsv, or other names with
            these endings. A line is a label (0 or 1), two ids and two texts, separated by tabs.
        length: the most bytes that are read of each paper; None: 4,000.
        fixed: whether every batch is padded to `length` (SequenceSamples).
    """

    needs = (
        "sequence.data=retrieval is read from disk: sequence.path=FOLDER with the Long Range "
        "Arena's new_aan_pairs.train.tsv, new_aan_pairs.eval.tsv and new_aan_pairs.test.tsv."
    )

    def __init__(
        self, path: str | Path | None, *, length: int | None = None, fixed: bool = False
    ) -> None:
        super().__init__(path, None)
        self.length, self.fixed = length or LENGTH, fixed

    @property
    def shape(self) -> SequenceShape:
        return SequenceShape(classes=2, length=self.length, towers=2)

    def describe(self) -> str:
        return f"pairs of papers in {self.where}, up to {self.length:,} bytes each"

    def read(self, part: str) -> dict[str, Sequences]:
        files = sorted(Path(self.given()).glob(f"*{_NAMES[part]}.tsv"))
        if not files:
            raise UserError(
                f"sequence.path={self.path}: no file there ends in {_NAMES[part]}.tsv, "
                "which holds the pairs of papers."
            )
        pairs = ByteSequences(self.length)
        for file in files:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    label, *rest = line.rstrip(b"\r\n").split(b"\t")
                    if label not in _LABELS or len(rest) != 4:
                        raise UserError(
                            f"{file}:{number}: "
                            "expected label (0 or 1), id1, id2, text1, text2 with tabs between."
                        )
                    pairs.add(_LABELS[label], *rest[2:])
        return {part: pairs.finish()}
