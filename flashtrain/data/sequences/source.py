"""What a task's data is asked for, whichever task it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from flashtrain.data.loader import Samples
from flashtrain.data.sequences.batch import SequenceBatch

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class SequenceShape:
    """What a model needs to know of a task's samples.

    classes: answers. length: tokens of the longest sequence. vocab_size: token numbers, 0 (padding) included. side: of
    square images, whose tokens are grey levels; None for others. towers: sequences of a sample.
    """

    classes: int
    length: int
    vocab_size: int = 256
    side: int | None = None
    towers: int = 1


class SequenceSource(Protocol):
    """A task's data: `prepare` makes or reads it (in one process a machine), `split` opens a part of it, and `finish`
    turns what a loader handed over, on the device by now, into a SequenceBatch."""

    @property
    def shape(self) -> SequenceShape: ...

    def describe(self) -> str: ...

    def prepare(self) -> None: ...

    def split(self, name: str) -> Samples: ...

    def finish(self, batch: Any) -> SequenceBatch: ...


class ArraySource:
    """What sources share whose samples are tokens already: nothing is left to do on the device."""

    def finish(self, batch: Any) -> SequenceBatch:
        """The batch as it is."""
        return batch
