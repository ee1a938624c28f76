"""Tokenize text while a model trains on it, for corpora larger than the memory or the disk.

B micro-batch on this device, S sequence (context).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import pytorch_lightning as pl
import torch

from flashtrain.data.hub_source import datasets_library
from flashtrain.data.loader import align_batch_counts, epoch_order
from flashtrain.data.packing import Batch, packed_batch
from flashtrain.data.sources import TextSource
from flashtrain.data.special_tokens import counted
from flashtrain.data.tokenizers import Tokenizer, as_document
from flashtrain.errors import UserError

if TYPE_CHECKING:
    from datasets import IterableDataset

log = logging.getLogger(__name__)

GROUP_DOCUMENTS = 512  # the sizes of a group decide the order of documents: a promise
GROUP_CHARACTERS = 4_000_000
READY_BATCHES = 4  # prepared ahead

Shard = Callable[[], Iterator[str]]


class Place(NamedTuple):
    """A place in a TextStream: the epoch, group of documents, document and token to read next."""

    epoch: int = 0
    group: int = 0  # its group of documents in the epoch
    # Of `datasets` before that group; None: the epoch's beginning.
    state: dict[str, Any] | None = None
    documents: int = 0  # before it in the group
    tokens: int = 0  # before it in the document


def shards_of(source: TextSource) -> list[Shard]:
    """Return functions that each yield the documents of a part of the source: `source.shards()` if
    it has that method, else one function for all documents."""
    shards = getattr(source, "shards", None)
    return shards() if shards is not None else [source.documents]


@dataclass
class TextStream:
    """An endless stream of documents for one device, in a random order that
    follows from the seed."""

    shards: list[Shard]  # of the source
    tokenizer: Tokenizer
    seed: int  # of the order of shards and documents
    rank: int = 0
    world_size: int = 1
    held_out: Collection[str] = ()  # texts that are left out

    def documents(self, place: Place) -> Iterator[tuple[np.ndarray, Place]]:
        """Yield for each document, from the one at `place` on, its tokens and the Place of the
        first of them.

        Raises UserError if an epoch has no document for this device, or
        `datasets` is not installed.
        """
        while True:
            found = place.state is not None
            for texts, start in self._groups(place):
                order = epoch_order(len(texts), self.seed, start.epoch, start.group)
                if start == Place():  # the first documents
                    texts = list(counted(texts, self.tokenizer))
                ids = self.tokenizer.encode_batch(texts)
                for number in range(start.documents, len(texts)):
                    found = True
                    yield (
                        as_document(self.tokenizer, ids[order[number]]),
                        start._replace(documents=number, tokens=0),
                    )
            if not found:
                raise UserError(
                    f"no document for device {self.rank + 1} of {self.world_size}: "
                    "data.streaming=true shards the text by whole documents, after some are held "
                    "out. Set data.streaming=false, or use more text."
                )
            place = Place(place.epoch + 1)

    def _groups(self, place: Place) -> Iterator[tuple[list[str], Place]]:
        stream = self._epoch(place.epoch)
        if place.state is not None:
            stream.load_state_dict(place.state)
        texts: list[str] = []
        for row in stream:
            texts.append(row["text"])
            if len(texts) >= GROUP_DOCUMENTS or sum(map(len, texts)) >= GROUP_CHARACTERS:
                yield texts, place
                texts, place = [], Place(place.epoch, place.group + 1, stream.state_dict())
        if texts:
            yield texts, place

    def _epoch(self, epoch: int) -> IterableDataset:
        """Return this device's documents of an epoch: those of its shards or, if there are fewer
        shards than devices, every world_size-th document."""
        # The order of shards, and of documents in a group, is ours: the shuffle buffer of datasets
        # 5.2 loses its documents when a run resumes.
        library = datasets_library()
        from datasets.distributed import split_dataset_by_node

        few = len(self.shards) < self.world_size
        own = self.shards if few else self.shards[self.rank :: self.world_size]
        order = epoch_order(len(own), self.seed, epoch, 0 if few else self.rank)
        shards = {"shards": [own[number] for number in order]}
        stream = library.IterableDataset(
            library.iterable_dataset.ExamplesIterable(self._texts, shards)
        )
        return split_dataset_by_node(stream, self.rank, self.world_size) if few else stream

    def _texts(self, shards: list[Shard]) -> Iterator[tuple[int, dict[str, str]]]:
        for shard in shards:
            for number, text in enumerate(shard()):
                if text and text not in self.held_out:
                    yield number, {"text": text}


def packed_batches(
    stream: TextStream, place: Place, context: int, batch_size: int, document_mask: bool
) -> Iterator[tuple[Batch, Place]]:
    """Yield micro-batches of the stream from a place on, each with the place where the
    next micro-batch begins."""
    size, needed = context, batch_size * context + 1
    documents = stream.documents(place)
    first, begin = next(documents)
    used = place.tokens
    pending = deque([(first[used:], begin)])
    while True:
        while sum(len(ids) for ids, _ in pending) < needed:
            pending.append(next(documents))
        tokens = np.concatenate([ids[:needed] for ids, _ in pending])
        ends = np.cumsum([len(ids) for ids, _ in pending])
        rows = range(0, batch_size * size, size)
        window = np.stack([tokens[row : row + size + 1] for row in rows]).astype(np.int64)
        crossed = [ends[(ends > row) & (ends <= row + size)] - row for row in rows]
        taken = batch_size * size
        while len(pending[0][0]) <= taken:
            taken -= len(pending.popleft()[0])
            used = 0
        ids, begin = pending[0]
        used += taken
        pending[0] = ids[taken:], begin
        yield packed_batch(window, crossed, document_mask), begin._replace(tokens=used)


@dataclass(eq=False)
class StreamLoader:
    """Loads a run's micro-batches for this device from a TextStream, from the
    run's current step on.

    A thread of this process reads, tokenizes and packs ahead.
    """

    stream: TextStream  # this device's documents
    context: int  # S
    document_mask: bool  # see packing.PackedSamples
    batch_size: int  # B
    total_steps: int  # optimizer steps of the run
    accumulate: int  # micro-batches of a step
    trainer: pl.Trainer | None = None  # see loader.ResumableLoader
    pin_memory: bool = False  # whether batches are copied to page-locked memory

    def __post_init__(self) -> None:
        self._places = {0: Place()}  # micro-batch of the run -> its place; the latest ones
        self._begin = self._taken = 0

    def __len__(self) -> int:
        return self.total_steps * self.accumulate

    @property
    def step(self) -> int:
        """The number of optimizer steps done."""
        if self.trainer is not None:
            return self.trainer.global_step
        return (self._begin + self._taken) // self.accumulate

    @property
    def epochs(self) -> float:
        """The number of times that this device has read its part of the text."""
        return self._places[max(self._places)].epoch

    def __iter__(self) -> Iterator[Batch]:
        self._begin, self._taken = self.step * self.accumulate, 0
        made = self._batches(self._places[self._begin])
        thread = ThreadPoolExecutor(1)
        coming = deque(thread.submit(next, made) for _ in range(READY_BATCHES))
        try:
            for number in range(self._begin, self._begin + len(self) - self._begin % len(self)):
                batch, self._places[number + 1] = coming.popleft().result()
                coming.append(thread.submit(next, made))
                self._places.pop(number - 2 * self.accumulate, None)
                self._taken += 1
                yield batch
        finally:
            thread.shutdown(cancel_futures=True)

    def _batches(self, place: Place) -> Iterator[tuple[Batch, Place]]:
        for batch, after in packed_batches(
            self.stream, place, self.context, self.batch_size, self.document_mask
        ):
            if self.pin_memory:
                batch = cast(
                    Batch,
                    {name: cast(torch.Tensor, one).pin_memory() for name, one in batch.items()},
                )
            yield batch, after

    def state_dict(self) -> dict[str, Any]:
        """Return the Places of all devices in their streams, as plain values. A collective: all
        devices must call this."""
        step = self.step
        own = (self.stream.rank, list(self._places[step * self.accumulate]))
        gathered: list[Any] = [own]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            gathered = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(gathered, own)
        places = [place for _, place in sorted(dict(gathered).items())]
        return {
            "step": step,
            "accumulate": self.accumulate,
            "seed": self.stream.seed,
            "streams": places,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with exactly the next token, also with micro-batches of another size.

        Raises UserError if the run has another number of devices, or the state is that
        of another kind of data.
        """
        if "streams" not in state_dict:
            raise UserError(
                "the checkpoint was saved with data.streaming=false. Resume with that setting."
            )
        places, stream = state_dict["streams"], self.stream
        if len(places) != stream.world_size:
            raise UserError(
                f"the run streamed its text to {len(places)} devices, each with its own place in "
                f"it. Resume on {len(places)} devices, not {stream.world_size}."
            )
        if state_dict["seed"] != stream.seed:
            log.warning("resuming with another seed: some documents may repeat")
        self._begin, self._taken = state_dict["step"] * self.accumulate, 0
        self._places = {self._begin: Place(*places[stream.rank])}
        if self.trainer is not None:
            align_batch_counts(self.trainer, len(self), state_dict["accumulate"], self.accumulate)
