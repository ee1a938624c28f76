"""Text that becomes tokens while it is trained on: for corpora larger than the memory or the disk. Nothing is written.

B micro-batch on this device, S sequence (context).

Each device reads its own files (or shards of a dataset) where there are enough, else every so many-th document. It goes
through them in an order that follows from seed and epoch, in groups of documents that are read, tokenised and shuffled
together. So a place in the stream is five numbers (Place), and a resumed run goes on with exactly the next token: what
the shuffle buffer of datasets 5.2 holds is lost then, and its state is one device's.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import pytorch_lightning as pl
import torch

from flashtrain.data.loader import align_batch_counts, epoch_order
from flashtrain.data.packing import Batch, packed_batch
from flashtrain.data.sources import TextSource
from flashtrain.data.tokenizers import Tokenizer, as_document
from flashtrain.errors import UserError

log = logging.getLogger(__name__)

GROUP_DOCUMENTS = 512
GROUP_CHARACTERS = 4_000_000
READY = 4  # batches that are made ahead

Shard = Callable[[], Iterator[str]]


class Place(NamedTuple):
    """Of the next token: the epoch; of the group of documents that it is in, the first one's shard (in the epoch's
    order) and number there; how many documents of the group come before it; how many tokens of its own document."""

    epoch: int = 0
    shard: int = 0
    document: int = 0
    before: int = 0
    tokens: int = 0


class Document(NamedTuple):
    """ids: with what stands before and after a text. place: of its first token."""

    ids: np.ndarray
    place: Place


def shards_of(source: TextSource) -> list[Shard]:
    """The parts of a source that can be read apart: `source.shards()` where it has them, else one."""
    shards = getattr(source, "shards", None)
    return shards() if shards is not None else [source.documents]


@dataclass
class TextStream:
    """The documents of one device, for ever. held_out: documents at the beginning of each shard that are left out.

    Raises UserError where an epoch has no document for this device.
    """

    shards: list[Shard]
    tokenizer: Tokenizer
    seed: int
    rank: int = 0
    world_size: int = 1
    held_out: tuple[int, ...] = ()

    def documents(self, place: Place) -> Iterator[Document]:
        """From this place on; the first document whole, also where `place` is within it."""
        epoch, shard, first, before = place[:4]
        while True:
            found = False
            for start, texts in self._groups(epoch, shard, first):
                order = epoch_order(len(texts), self.seed, epoch, *start)
                ids = self.tokenizer.encode_batch(texts)
                for number in range(before, len(texts)):
                    found = True
                    whole = as_document(self.tokenizer, ids[order[number]])
                    yield Document(whole, Place(epoch, *start, number))
                before = 0
            if not found and (shard, first) == (0, 0):
                raise UserError(
                    f"no document for device {self.rank + 1} of {self.world_size}: data.streaming=true deals out whole "
                    "documents, and some are held out. Leave it out, or give more text."
                )
            epoch, shard, first = epoch + 1, 0, 0

    def _groups(self, epoch: int, shard: int, first: int) -> Iterator[tuple[tuple[int, int], list[str]]]:
        """(shard and number of its first document, texts) of each group of the epoch, from this document on."""
        texts: list[str] = []
        start, characters = (shard, first), 0
        for here, text in self._texts(epoch, shard, first):
            if not texts:
                start = here
            texts.append(text)
            characters += len(text)
            if len(texts) >= GROUP_DOCUMENTS or characters >= GROUP_CHARACTERS:
                yield start, texts
                texts, characters = [], 0
        if texts:
            yield start, texts

    def _texts(self, epoch: int, shard: int, first: int) -> Iterator[tuple[tuple[int, int], str]]:
        """This device's documents of the epoch, from a shard and a document in it on: where each is, and its text."""
        by_shard = len(self.shards) >= self.world_size
        own = list(range(self.rank, len(self.shards), self.world_size)) if by_shard else list(range(len(self.shards)))
        order = epoch_order(len(own), self.seed, epoch, self.rank if by_shard else 0)
        for place in range(shard, len(own)):
            which = own[order[place]]
            left_out = self.held_out[which] if self.held_out else 0
            for number, text in enumerate(self.shards[which]()):
                mine = by_shard or (number + which) % self.world_size == self.rank
                if text and mine and number >= left_out and (place > shard or number >= first):
                    yield (place, number), text


class StreamedBatches:
    """Packed micro-batches of a stream, each with the place that the next one begins at."""

    def __init__(self, stream: TextStream, context: int, document_mask: bool) -> None:
        self.stream, self.context, self.document_mask = stream, context, document_mask

    def __call__(self, place: Place, batch_size: int) -> Iterator[tuple[Batch, Place]]:
        size = self.context
        documents = self.stream.documents(place)
        pending: deque[tuple[Document, int]] = deque()  # and how many of its tokens are used
        pending.append((next(documents), place.tokens))
        waiting = len(pending[0][0].ids) - place.tokens
        while True:
            window = np.empty((batch_size, size + 1), dtype=np.int64)
            ends = []
            for row in window:
                while waiting < size + 1:
                    pending.append((next(documents), 0))
                    waiting += len(pending[-1][0].ids)
                filled, crossed = 0, []
                for document, used in pending:
                    piece = document.ids[used : used + size + 1 - filled]
                    row[filled : filled + len(piece)] = piece
                    filled += len(piece)
                    if used + len(piece) == len(document.ids) and filled <= size:
                        crossed.append(filled)
                    if filled > size:
                        break
                ends.append(np.array(crossed, dtype=np.int64))
                waiting -= size
                taken = size  # the last token of a row is the next one's first
                while taken:
                    document, used = pending.popleft()
                    left = len(document.ids) - used
                    if left > taken:
                        pending.appendleft((document, used + taken))
                    taken -= min(left, taken)
            document, used = pending[0]
            yield packed_batch(window, ends, self.document_mask), document.place._replace(tokens=used)


class StreamLoader:
    """A run's micro-batches of a stream for this device, from the step that the run stands at.

    trainer: where given, its global_step is the place; without it, what was taken from the iterator, in whole steps.
    A thread of this process reads, tokenises and packs ahead.
    """

    def __init__(
        self,
        batches: StreamedBatches,
        *,
        batch_size: int,
        total_steps: int,
        accumulate: int,
        trainer: pl.Trainer | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.batches = batches
        self.batch_size = batch_size
        self.total_steps = total_steps
        self.accumulate = accumulate
        self.trainer = trainer
        self.pin_memory = pin_memory
        self._places = {0: Place()}  # micro-batch of the run -> where it begins; of the latest ones
        self._begin = self._taken = 0

    def __len__(self) -> int:
        return self.total_steps * self.accumulate

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        if self.trainer is not None:
            return self.trainer.global_step
        return (self._begin + self._taken) // self.accumulate

    @property
    def epochs(self) -> int:
        """How often this device has been through its part."""
        return max(self._places.values()).epoch

    def __iter__(self) -> Iterator[Batch]:
        self._begin, self._taken = self.step * self.accumulate, 0
        place = self._places.get(self._begin)
        if place is None:
            raise UserError(f"the place in the text at step {self.step} is not known: the checkpoint does not say it.")
        coming: queue.Queue[Any] = queue.Queue(READY)
        stopped = threading.Event()
        maker = threading.Thread(target=self._make, args=(place, coming, stopped), daemon=True)
        maker.start()
        try:
            for number in range(self._begin, self._begin + len(self) - self._begin % len(self)):
                made = coming.get()
                if isinstance(made, BaseException):
                    raise made
                batch, self._places[number + 1] = made
                for old in [key for key in self._places if key < number - 2 * self.accumulate - READY]:
                    del self._places[old]
                self._taken += 1
                yield batch
        finally:
            stopped.set()
            maker.join(timeout=5)

    def _make(self, place: Place, coming: queue.Queue[Any], stopped: threading.Event) -> None:
        def put(made: Any) -> None:
            while not stopped.is_set():
                try:
                    return coming.put(made, timeout=0.1)
                except queue.Full:
                    continue

        try:
            for batch, after in self.batches(place, self.batch_size):
                if self.pin_memory:
                    batch = cast(Batch, {name: cast(torch.Tensor, one).pin_memory() for name, one in batch.items()})
                put((batch, after))
                if stopped.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 - raised where the batches are taken
            put(error)

    def state_dict(self) -> dict[str, Any]:
        """Every device's place, gathered from all of them: all call this. Plain numbers."""
        step = self.step
        stream = self.batches.stream
        own = (stream.rank, list(self._places[step * self.accumulate]))
        gathered: list[Any] = [own]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            gathered = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(gathered, own)
        return {
            "step": step,
            "accumulate": self.accumulate,
            "seed": stream.seed,
            "places": [place for _, place in sorted(dict(gathered).items())],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with exactly the next token, also in other micro-batches. Raises UserError: another number of devices,
        a state that holds no places."""
        if "places" not in state_dict:
            raise UserError("the checkpoint is of another kind of data: leave data.streaming=true out.")
        places, stream = state_dict["places"], self.batches.stream
        if len(places) != stream.world_size:
            raise UserError(
                f"the run streamed its text to {len(places)} devices, and each has its own place: go on with as many, "
                f"not {stream.world_size}."
            )
        if state_dict["seed"] != stream.seed:
            log.warning("resuming with another seed: some documents may repeat")
        self._begin, self._taken = state_dict["step"] * self.accumulate, 0
        self._places = {self._begin: Place(*places[stream.rank])}
        if self.trainer is not None:
            align_batch_counts(self.trainer, len(self), state_dict["accumulate"], self.accumulate)
