"""Texts as sequences of bytes, gathered one after another."""

from __future__ import annotations

import numpy as np

from flashtrain.data.sequences.samples import Sequences
from flashtrain.errors import UserError

# Byte 0 stands in no text and is the padding; where it does stand in one, it becomes a space.
_SPACE = b" "


class ByteSequences:
    """Texts and labels while they are read; `finish` makes them Sequences. length: bytes kept of each text."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._bytes = bytearray()
        self._offsets = [0]
        self._labels: list[int] = []

    def add(self, label: int, *texts: str | bytes) -> None:
        """A sample of one or more texts."""
        for text in texts:
            encoded = text.encode("utf-8", "replace") if isinstance(text, str) else text
            self._bytes += encoded[: self.length].replace(b"\0", _SPACE)
            self._offsets.append(len(self._bytes))
        self._labels.append(label)

    def __len__(self) -> int:
        return len(self._labels)

    def finish(self) -> Sequences:
        """What was added."""
        tokens = np.frombuffer(bytes(self._bytes), dtype=np.uint8)
        return Sequences(tokens, np.array(self._offsets, dtype=np.int64), np.array(self._labels, dtype=np.uint8))


def held_out(count: int, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(kept, held out): numbers below count, `size` of them drawn to be held out, the same for equal seeds.

    UserError: none would be kept.
    """
    if count <= size:
        raise UserError(f"{count} training samples are too few to hold out sequence.validation={size}: choose fewer.")
    order = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, 7)))).permutation(count)
    return np.sort(order[size:]), np.sort(order[:size])
