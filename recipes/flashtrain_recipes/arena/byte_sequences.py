"""Sequences of bytes in memory, and the base classes of the Arena's tasks that are read
from files and datasets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np

from flashtrain.data.loader import epoch_order
from flashtrain.data.sequences import SequenceShape
from flashtrain.errors import UserError
from flashtrain_recipes.arena.sequence_samples import Sequences, SequenceSamples

_SPACE = b" "  # for byte 0 in a text, which is the padding


class ByteSequences:
    """Collects texts as bytes, with their labels.

    Args:
        length: the most bytes that are read of each text.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._bytes = bytearray()
        self._offsets = [0]
        self._labels: list[int] = []

    def add(self, label: int, *texts: str | bytes) -> None:
        """Add a sample of one or more texts with its label."""
        for text in texts:
            encoded = text.encode("utf-8", "replace") if isinstance(text, str) else text
            self._bytes += encoded[: self.length].replace(b"\0", _SPACE)
            self._offsets.append(len(self._bytes))
        self._labels.append(label)

    def finish(self) -> Sequences:
        """Return all texts that `add` collected, as one Sequences."""
        tokens = np.frombuffer(self._bytes, dtype=np.uint8)
        return Sequences(
            tokens, np.array(self._offsets, dtype=np.int64), np.array(self._labels, dtype=np.uint8)
        )


class ReadSource(ABC):
    """Base class of a task whose splits are read, or generated, when first
    used, and stay in memory."""

    fixed = True  # see SequenceSamples

    def __init__(self) -> None:
        self._parts: dict[str, Sequences] = {}

    @property
    @abstractmethod
    def shape(self) -> SequenceShape: ...

    @abstractmethod
    def read(self, part: str) -> dict[str, Sequences]:
        """Return the named split, with any others that are read together with
        it, as {name: sequences}."""

    def prepare(self) -> None:  # noqa: B027 - most have nothing to make
        """Do nothing: each process reads for itself."""

    def split(self, name: str) -> SequenceSamples:
        """Return the samples of the split "train", "validation" or "test"."""
        if name not in self._parts:
            self._parts |= self.read(name)
        return SequenceSamples(self._parts[name], self.shape.length, fixed=self.fixed)


class FileSource(ReadSource):
    """Base class of a task that is read from the folder `path`, or, with path=None, from the
    dataset `name` by the library `datasets`."""

    needs: str  # the error message where neither is given

    def __init__(self, path: str | Path | None, name: str | None) -> None:
        super().__init__()
        self.path, self.name = None if path is None else Path(path).expanduser(), name

    @property
    def where(self) -> str:
        """The path or the dataset's name, in words for messages."""
        return str(self.path or self.name or f"a place that is not given yet: {self.needs}")

    def given(self) -> Path | str:
        """Return the data's folder, or the dataset's name where no folder is set. Raises
        UserError where neither is set, or there is no such folder."""
        if self.path is None and not self.name:
            raise UserError(self.needs)
        if self.path is not None and not self.path.is_dir():
            raise UserError(
                f"sequence.path={self.path} is no folder (seen from {Path.cwd()}). "
                "Set it to the data's folder."
            )
        return self.path or str(self.name)


def with_held_out(sequences: Sequences, size: int, seed: int) -> dict[str, Sequences]:
    """Divide training samples at random into "train", and "validation" with `size` samples.

    Raises:
        UserError: no sample would be left to train on.
    """
    count = len(sequences.labels)
    if count <= size:
        raise UserError(
            f"{count} training samples are too few to hold out sequence.validation={size}: "
            "lower sequence.validation."
        )
    order = epoch_order(count, seed, 7)
    return {
        "train": sequences.chosen(np.sort(order[size:])),
        "validation": sequences.chosen(np.sort(order[:size])),
    }
