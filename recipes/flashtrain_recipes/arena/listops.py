"""The Arena's task ListOps: the value, one of ten, of a long nested expression.
Expressions are generated."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from hashlib import blake2b

import numpy as np

from flashtrain.data.sequences import SequenceShape
from flashtrain.errors import UserError
from flashtrain_recipes.arena.byte_sequences import ReadSource
from flashtrain_recipes.arena.sequence_samples import Sequences

log = logging.getLogger(__name__)

CLASSES = 10
VOCABULARY = 16  # padding, ten digits, four operators, the closing bracket
MIN_LENGTH, MAX_LENGTH = 500, 2000  # symbols; neither included
COUNTS = {"train": 96_000, "validation": 2_000, "test": 2_000}  # the Arena's
_CHUNK = 4096  # expressions that are generated at once


class ListOps(ReadSource):
    """Randomly generated expressions, all different.

    Args:
        counts: {split: number of expressions}, generated in this order.
        shortest, longest: bounds of the number of an expression's symbols, both excluded.
        fixed: whether every batch is padded to `longest` (SequenceSamples).

    Raises:
        UserError: no length lies between the bounds; when read: numba is missing, or there
            are too few expressions.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        counts: Mapping[str, int] = COUNTS,
        shortest: int = MIN_LENGTH,
        longest: int = MAX_LENGTH,
        fixed: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= shortest < longest - 1:
            raise UserError(
                f"no expression is longer than {shortest} and below {longest} symbols: "
                "raise sequence.length."
            )
        self.seed, self.shortest, self.longest = seed, shortest, longest
        self.counts, self.fixed = dict(counts), fixed

    @property
    def shape(self) -> SequenceShape:
        return SequenceShape(classes=CLASSES, length=self.longest, vocab_size=VOCABULARY)

    def describe(self) -> str:
        counts = ", ".join(f"{count:,} {name}" for name, count in self.counts.items())
        return f"ListOps, {self.shortest} to {self.longest} symbols, seed {self.seed}: {counts}"

    def read(self, part: str) -> dict[str, Sequences]:
        everything = _generated(self.seed, sum(self.counts.values()), self.shortest, self.longest)
        found, begin = {}, 0
        for name, count in self.counts.items():
            found[name] = everything.chosen(np.arange(begin, begin + count))
            begin += count
        return found


def _generated(seed: int, count: int, shortest: int, longest: int) -> Sequences:
    try:
        from flashtrain_recipes.arena.listops_trees import expressions
    except ImportError as error:
        raise UserError("generating ListOps needs numba: pip install numba.") from error
    log.info("generating %s ListOps expressions", f"{count:,}")
    seen: set[bytes] = set()
    pieces: list[np.ndarray] = []
    labels: list[int] = []
    number, idle = 0, 0
    rows = min(count, _CHUNK)
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
            raise UserError(
                f"fewer than {count:,} expressions of {shortest} to {longest} symbols exist: "
                "lower sequence.train, validation and test, or raise sequence.length."
            )
    ends = np.cumsum([len(piece) for piece in pieces])
    return Sequences(
        np.concatenate(pieces),
        np.concatenate([[0], ends]).astype(np.int64),
        np.array(labels, dtype=np.uint8),
    )
