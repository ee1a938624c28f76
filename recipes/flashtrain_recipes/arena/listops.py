"""ListOps of the Long Range Arena: the value of a long nested expression, one of ten classes; generated, none twice."""

from __future__ import annotations

import logging
import os
from hashlib import blake2b

import numpy as np

from flashtrain.data.sequences import Sequences, SequenceSamples, SequenceShape
from flashtrain.errors import UserError
from flashtrain_recipes.arena.sequence_rows import open_or_build

log = logging.getLogger(__name__)

VERSION = 1
CLASSES = 10
VOCABULARY = 16  # padding, ten digits, four operators, the closing bracket
SHORTEST, LONGEST = 500, 2000  # neither included
COUNTS = {"train": 96_000, "validation": 2_000, "test": 2_000}  # the Arena's
_AT_ONCE = 4096


class ListOps:
    """seed: of the expressions. train, validation, test: how many of each, in the order they are made. shortest,
    longest: symbols of an expression, neither included. fixed: see SequenceSamples.

    Made once, in seconds, and kept in the cache folder. UserError where numba is missing, or nothing fits the lengths.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        train: int = COUNTS["train"],
        validation: int = COUNTS["validation"],
        test: int = COUNTS["test"],
        shortest: int = SHORTEST,
        longest: int = LONGEST,
        fixed: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if not 0 <= shortest < longest - 1:
            raise UserError(
                f"expressions longer than {shortest} and shorter than {longest} symbols. Possible: 500, 2000."
            )
        self.seed, self.shortest, self.longest = seed, shortest, longest
        self.counts = {"train": train, "validation": validation, "test": test}
        self.fixed, self.cache_dir = fixed, cache_dir
        self._all: Sequences | None = None

    @property
    def shape(self) -> SequenceShape:
        return SequenceShape(classes=CLASSES, length=self.longest, vocab_size=VOCABULARY)

    def describe(self) -> str:
        counts = ", ".join(f"{count:,} {name}" for name, count in self.counts.items())
        return f"ListOps, {self.shortest} to {self.longest} symbols, seed {self.seed}: {counts}"

    def prepare(self) -> None:
        """Generate what is not in the cache."""
        if self._all is None:
            total = sum(self.counts.values())
            name = f"listops-{self.shortest}-{self.longest}-seed{self.seed}-{total}-v{VERSION}"
            self._all = open_or_build(
                name, lambda: _generated(self.seed, total, self.shortest, self.longest), self.cache_dir
            )

    def split(self, name: str) -> SequenceSamples:
        """One of "train", "validation", "test"."""
        self.prepare()
        names = list(self.counts)
        begin = sum(self.counts[other] for other in names[: names.index(name)])
        if self._all is None:
            raise UserError("the expressions are not made yet: call prepare() first.")
        return SequenceSamples(self._all.part(begin, begin + self.counts[name]), self.longest, fixed=self.fixed)


def _generated(seed: int, count: int, shortest: int, longest: int) -> Sequences:
    """`count` different expressions, in the order of their numbers."""
    try:
        from flashtrain_recipes.arena.listops_trees import expressions
    except ImportError as error:
        raise UserError("generating ListOps needs numba: pip install numba.") from error
    log.info("generating %s ListOps expressions (once)", f"{count:,}")
    seen: set[bytes] = set()
    pieces: list[np.ndarray] = []
    labels: list[int] = []
    number, idle = 0, 0
    rows = min(count, _AT_ONCE)
    tokens = np.zeros((rows, longest), dtype=np.uint8)
    lengths, values = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.uint8)
    while len(pieces) < count:
        before = len(pieces)
        filled, number = expressions(seed, number, shortest, longest, tokens, lengths, values)
        for row in range(filled):
            symbols = tokens[row, : lengths[row]].copy()
            key = blake2b(symbols.tobytes(), digest_size=16).digest()
            if key not in seen and len(pieces) < count:
                seen.add(key)
                pieces.append(symbols)
                labels.append(values[row])
        idle = idle + 1 if len(pieces) == before else 0
        if idle == 100:
            raise UserError(f"there are no {count:,} different expressions of {shortest} to {longest} symbols.")
    ends = np.cumsum([len(piece) for piece in pieces])
    return Sequences(
        np.concatenate(pieces), np.concatenate([[0], ends]).astype(np.int64), np.array(labels, dtype=np.uint8)
    )
