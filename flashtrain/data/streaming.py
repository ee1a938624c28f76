"""The LightningDataModule of streamed text."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from flashtrain.data.datamodule import TextDataModule
from flashtrain.data.sources import TextSource, held_out
from flashtrain.data.special_tokens import tokenizer_for
from flashtrain.data.text_stream import StreamLoader, TextStream, shards_of
from flashtrain.data.token_cache import OpenTokens
from flashtrain.data.tokenizers import Tokenizer, TokenizerSpec, as_document, make_tokenizer
from flashtrain.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOutTokens(OpenTokens):
    """OpenTokens whose tokens lie in memory instead of a file; all of their
    documents are held out."""

    tokens: Any = None


class StreamingDataModule(TextDataModule):
    """A TextDataModule that tokenizes text while a model trains on it, and writes nothing to disk.

    Files that are named for validation are held out, or else the first documents: as many
    as validation_samples need, and at most validation_fraction of the text if its size is
    known. `cache` holds them.

    Args:
        source: A TextSource.
        tokenizer: As in TextDataModule, but not "bpe", which is trained on all of the text.
        *more: Further positional arguments of TextDataModule.
        **options: Further arguments of TextDataModule by name; num_workers and
            cache_dir have no effect.

    Raises:
        UserError: As in TextDataModule; or the tokenizer is "bpe".
    """

    def __init__(
        self,
        source: Any,
        tokenizer: str | TokenizerSpec | Tokenizer = "bytes",
        *more: Any,
        **options: Any,
    ):
        super().__init__(source, tokenizer, *more, **options)
        if isinstance(self.tokenizer_spec, TokenizerSpec) and self.tokenizer_spec.kind == "bpe":
            raise UserError(
                "data.streaming=true cannot train a tokenizer. "
                "Set data.tokenizer=bytes, gpt2 or FOLDER."
            )
        self._left_out: frozenset[str] = frozenset()

    @cached_property
    def cache(self) -> OpenTokens:
        """The documents that are held out, the same ones on all devices."""
        source, spec = self.source, self.tokenizer_spec
        if not isinstance(source, TextSource):
            raise UserError(
                f"data.streaming=true needs text, not {source.describe()}. "
                "Set data.streaming=false."
            )
        tokenizer = tokenizer_for(source, make_tokenizer(spec))
        named = held_out(source) if self.validation is None else self.validation
        wanted = self.validation_samples * self.context + 1 if self.validation_fraction else 0
        size = source.approximate_bytes() if wanted and named is None else None
        room = float("inf") if size is None else self.validation_fraction * size  # bytes
        texts, documents, tokens = [], [np.empty(0, dtype=np.int64)], 0
        for text in (named or source).documents() if wanted else ():
            if tokens >= wanted or room <= 0:
                break
            room -= len(text.encode("utf-8", errors="replace"))
            if text:
                texts.append(text)
                documents.append(as_document(tokenizer, tokenizer.encode_batch([text])[0]))
                tokens += len(documents[-1])
        if wanted and tokens < self.context + 1:
            log.warning(
                (
                    "the streamed text is too small to hold a document out for "
                    "validation with context=%s"
                ),
                self.context,
            )
            self.validation_fraction, texts, documents = 0.0, [], documents[:1]
        self._left_out = frozenset(texts if named is None else ())
        offsets = np.cumsum([len(document) for document in documents])
        everything = np.ones(len(texts), dtype=bool)
        return HeldOutTokens(
            Path(), (), offsets, tokenizer, everything, tokens=np.concatenate(documents)
        )

    def describe(self) -> str:
        first = "the first " if self._left_out else ""
        held_out = (
            f"{first}{self.cache.documents:,} documents, {self.validation_tokens:,} tokens, "
            "held out"
        )
        parts = (
            f"streamed in {len(shards_of(cast(TextSource, self.source))):,} parts, "
            "nothing is written"
        )
        return f"{self.source.describe()} | {self.tokenizer.describe()} | {parts} | {held_out}"

    def steps_of(self, epochs: float, samples: int) -> tuple[int, float]:
        """Not available: the length of the text is not known. Raises UserError."""
        raise UserError(
            f"trainer.epochs={epochs:g} needs text of a known length. "
            "Set trainer.steps, or data.streaming=false."
        )

    def train_dataloader(self) -> StreamLoader:  # type: ignore[override]
        """Return the run's micro-batches for this device, from the trainer's current step on."""
        self._check()
        world_size, rank = self._place()
        shards = shards_of(cast(TextSource, self.source))
        stream = TextStream(shards, self.tokenizer, self.seed, rank, world_size, self._left_out)
        self._train_loader = StreamLoader(
            stream,
            context=self.context,
            document_mask=self.document_mask,
            batch_size=self.batch_size,
            total_steps=self.total_steps,
            accumulate=self.accumulate,
            trainer=self.trainer,
            pin_memory=self._pin_memory(),
        )
        return self._train_loader
