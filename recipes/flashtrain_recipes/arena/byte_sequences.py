"""Sequences of bytes in memory: what the Arena's tasks that are read from files and datasets share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np

from flashtrain.data.sequences import SequenceShape
from flashtrain.errors import UserError
from flashtrain_recipes.arena.sequence_samples import Sequences, SequenceSamples

_SPACE = b" "  # for byte 0 in a text, which is the padding


class ByteSequences:
    """Texts and labels while they are read.

    Args:
        length: bytes of each text that are read.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._bytes = bytearray()
        self._offsets = [0]
        self._labels: list[int] = []

    def add(self, label: int, *texts: str | bytes) -> None:
        """Add a sample of one or more texts."""
        for text in texts:
            encoded = text.encode("utf-8", "replace") if isinstance(text, str) else text
            self._bytes += encoded[: self.length].replace(b"\0", _SPACE)
            self._offsets.append(len(self._bytes))
        self._labels.append(label)

    def finish(self) -> Sequences:
        """Return what was added."""
        tokens = np.frombuffer(self._bytes, dtype=np.uint8)
        return Sequences(tokens, np.array(self._offsets, dtype=np.int64), np.array(self._labels, dtype=np.uint8))


class ReadSource(ABC):
    """A task whose parts are read, or made, when first used, and stay in memory."""

    fixed = True  # see SequenceSamples

    def __init__(self) -> None:
        self._parts: dict[str, Sequences] = {}

    @property
    @abstractmethod
    def shape(self) -> SequenceShape: ...

    @abstractmethod
    def read(self, part: str) -> dict[str, Sequences]:
        """Return a part by its name, and those that are read with it."""

    def prepare(self) -> None:  # noqa: B027 - most have nothing to make
        """Do nothing: each process reads for itself."""

    def split(self, name: str) -> SequenceSamples:
        """Return the samples of "train", "validation" or "test"."""
        if name not in self._parts:
            self._parts |= self.read(name)
        return SequenceSamples(self._parts[name], self.shape.length, fixed=self.fixed)


class FileSource(ReadSource):
    """A task read from `path`, or, where that is None, from the dataset that `datasets` calls `name`."""

    needs: str  # a message for whoever gave neither

    def __init__(self, path: str | Path | None, name: str | None) -> None:
        super().__init__()
        self.path, self.name = None if path is None else Path(path).expanduser(), name

    @property
    def where(self) -> str:
        """The path or the dataset's name, in words."""
        return str(self.path or self.name or f"a place that is not given yet: {self.needs}")

    def given(self) -> Path | str:
        """Return the path, or the dataset's name. Raises UserError: there is neither, or no such folder."""
        if self.path is None and not self.name:
            raise UserError(self.needs)
        if self.path is not None and not self.path.is_dir():
            raise UserError(f"sequence.path={self.path} is no folder (seen from {Path.cwd()}).")
        return self.path or str(self.name)


def with_held_out(sequences: Sequences, size: int, seed: int) -> dict[str, Sequences]:
    """Return the training samples in two parts: "train", and "validation" of `size` samples that the seed draws.

    Raises:
        UserError: none would be left to train on.
    """
    count = len(sequences.labels)
    if count <= size:
        raise UserError(f"{count} training samples are too few to hold out sequence.validation={size}: choose fewer.")
    order = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, 7)))).permutation(count)
    return {"train": sequences.chosen(np.sort(order[size:])), "validation": sequences.chosen(np.sort(order[:size]))}
