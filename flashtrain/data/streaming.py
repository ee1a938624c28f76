"""The LightningDataModule of text that is streamed (text_stream: how)."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from flashtrain.data.datamodule import TextDataModule
from flashtrain.data.packing import Batch, PackedSamples, Spans
from flashtrain.data.sources import TextSource, held_out
from flashtrain.data.text_stream import Shard, StreamLoader, TextStream, shards_of
from flashtrain.data.token_cache import TokenCache
from flashtrain.data.tokenizers import Tokenizer, TokenizerSpec, as_document, make_tokenizer
from flashtrain.errors import UserError

log = logging.getLogger(__name__)


class _InMemory:
    """Held-out tokens, as PackedSamples maps them."""

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens

    def mapped(self) -> np.ndarray:
        return self._tokens


class StreamingDataModule(TextDataModule):
    """A TextDataModule without a token file: text_stream says how. Its tokenizer is not trained on the text.

    What is named for validation is held out, else the first documents: as many as validation_samples need, and at most
    validation_fraction of the text where its size is known. num_workers and cache_dir are not used.
    """

    def __init__(self, source: Any, tokenizer: str | TokenizerSpec | Tokenizer = "bytes", *more: Any, **options: Any):
        super().__init__(source, tokenizer, *more, **options)
        if isinstance(self.tokenizer_spec, TokenizerSpec) and self.tokenizer_spec.kind == "bpe":
            raise UserError("text that is streamed trains no tokenizer: choose bytes, gpt2 or a tokenizer's folder.")
        self._made: Tokenizer | None = None
        self._shards: list[Shard] = []
        self._held_out: list[np.ndarray] = []
        self._left_out: frozenset[str] = frozenset()
        self._stream_loader: StreamLoader | None = None

    def prepare_data(self) -> None:
        """Make the tokenizer, and read what is held out."""
        if self._made is not None:
            return
        if not isinstance(self.source, TextSource):
            raise UserError(f"what is streamed is text, and the source is {self.source.describe()}.")
        spec = self.tokenizer_spec
        self._made = make_tokenizer(spec, self.source) if isinstance(spec, TokenizerSpec) else spec
        self._shards = shards_of(self.source)
        self._hold_out(self.source)

    def setup(self, stage: str | None = None) -> None:
        self.prepare_data()

    def _hold_out(self, source: TextSource) -> None:
        """Take the documents that are named for it, or the text's first, which are not trained on. All devices take
        the same."""
        named = held_out(source) if self.validation is None else self.validation
        wanted = self.validation_samples * self.context + 1 if self.validation_fraction else 0
        size = source.approximate_bytes() if wanted and named is None else None
        room = float("inf") if size is None else self.validation_fraction * size  # bytes
        texts, tokens = [], 0
        for text in (named or source).documents() if wanted else ():
            if tokens >= wanted or room <= 0:
                break
            room -= len(text.encode("utf-8", errors="replace"))
            if text:
                texts.append(text)
                self._held_out.append(as_document(self.tokenizer, self.tokenizer.encode_batch([text])[0]))
                tokens += len(self._held_out[-1])
        if tokens < self.context + 1:
            if wanted:
                log.warning("the streamed text has no document to spare for validation with context=%s", self.context)
            self._held_out, texts = [], []
        self._left_out = frozenset(texts if named is None else ())

    @property
    def cache(self) -> TokenCache:
        raise UserError("data.streaming=true has no token file, which this needs: leave it out.")

    @property
    def tokenizer(self) -> Tokenizer:
        if self._made is None:
            raise UserError("the data is not read yet: call setup() first.")
        return self._made

    @property
    def train_tokens(self) -> int:
        """Nobody knows: 0."""
        return 0

    @property
    def validation_tokens(self) -> int:
        return sum(map(len, self._held_out))

    @property
    def held_out_samples(self) -> int:
        return min(self.validation_samples, len(self._held_out_samples())) if self._held_out else 0

    @property
    def epochs_seen(self) -> float:
        return float(self._stream_loader.epochs) if self._stream_loader is not None else 0.0

    def epochs_of_parts(self, samples: int) -> str | None:
        return None

    def describe(self) -> str:
        first = "the first " if self._left_out else ""
        held_out = f"{first}{len(self._held_out):,} documents, {self.validation_tokens:,} tokens, held out"
        parts = f"streamed in {len(self._shards):,} parts, nothing is written"
        return f"{self.source.describe()} | {self.tokenizer.describe()} | {parts} | {held_out}"

    def train_dataloader(self) -> StreamLoader:  # type: ignore[override]
        """The run's micro-batches for this device, from the step that the trainer stands at."""
        self._check()
        world_size, rank = self._place()
        stream = TextStream(self._shards, self.tokenizer, self.seed, rank, world_size, self._left_out)
        self._stream_loader = StreamLoader(
            stream,
            context=self.context,
            document_mask=self.document_mask,
            batch_size=self.batch_size,
            total_steps=self.total_steps,
            accumulate=self.accumulate,
            trainer=self.trainer,
            pin_memory=self._pin_memory(),
        )
        return self._stream_loader

    def val_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        self._check()
        if not self._held_out:
            return []
        batch_size = self.validation_batch or self.batch_size
        return self._once(self._held_out_samples(), self.validation_samples, batch_size)

    def _held_out_samples(self) -> PackedSamples:
        ends = np.cumsum([len(document) for document in self._held_out])
        spans = Spans(np.concatenate([[0], ends[:-1]]), ends)
        tokens = _InMemory(np.concatenate(self._held_out))
        return PackedSamples(tokens, "int64", spans, self.context, self.document_mask)
