"""Mix several corpora by weight: each has its own token file and held-out part, and every step draws from all.

The samples of a run are numbered. Each block of BLOCK numbers holds every part's share exactly, in a random order.

Why not interleave_datasets of datasets 5.2: it mixes documents, not tokens. Equal weights of texts of 1,000 and 100
characters gave 91% and 9% of the text.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from flashtrain.data.loader import StepSampler, epoch_order
from flashtrain.data.packing import Batch, PackedSamples, Spans, Split
from flashtrain.data.sources import TextSource, TokenSource
from flashtrain.data.token_cache import OpenTokens, open_split
from flashtrain.data.tokenizers import BPETokenizer, Tokenizer, TokenizerSpec, first_bytes, load_tokenizer
from flashtrain.errors import UserError
from flashtrain.files.caches import default_cache_dir, only_writer

BLOCK = 10_000


class Part(NamedTuple):
    """A source of the mixture. Its share of the samples is weight / sum of all weights."""

    name: str
    source: TextSource | TokenSource
    weight: float


class MixtureSource:
    """Named sources with a weight each, all encoded by one tokenizer.

    A "bpe" tokenizer is trained on the beginnings of all sources, of each in proportion to its weight.
    """

    def __init__(self, parts: Mapping[str, tuple[TextSource | TokenSource, float]]) -> None:
        self.parts = [Part(name, source, float(weight)) for name, (source, weight) in parts.items()]

    @property
    def shares(self) -> np.ndarray:
        """(parts,) float64: each part's share of the samples."""
        weights = np.array([part.weight for part in self.parts])
        return weights / weights.sum()

    def describe(self) -> str:
        shares = zip(self.parts, self.shares, strict=True)
        return "mixture of " + ", ".join(
            f"{part.name} {share:.0%} ({part.source.describe()})" for part, share in shares
        )

    def open_tokens(
        self, tokenizer: TokenizerSpec | Tokenizer, cache_dir: str | os.PathLike[str] | None
    ) -> OpenMixture:
        """The tokens of every part, made if they are missing. Raises UserError."""
        if isinstance(tokenizer, TokenizerSpec) and tokenizer.kind == "bpe":
            tokenizer = self._trained(tokenizer, cache_dir)
        caches = [open_split(part.source, tokenizer, cache_dir) for part in self.parts]
        folder = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
        return OpenMixture([part.name for part in self.parts], caches, block_counts(self.shares), folder)

    def _trained(self, spec: TokenizerSpec, cache_dir: str | os.PathLike[str] | None) -> Tokenizer:
        """A BPE trained on the beginnings of all parts, of each in proportion to its share; the cache saves it."""
        texts = []
        for part, share in zip(self.parts, self.shares, strict=True):
            if isinstance(part.source, TokenSource):
                raise UserError(
                    f"data.mixture.{part.name} is tokens already. Set data.tokenizer to the tokenizer that made them."
                )
            texts.append((part.source, max(1, int(share * spec.sample_bytes))))
        key = (spec.key(), repr([(source.fingerprint(), size) for source, size in texts]))
        base = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
        folder = base / "mixture-tokenizers" / hashlib.sha256(repr(key).encode()).hexdigest()[:12]
        with only_writer(folder, "data.cache_dir"):
            if not (folder / "tokenizer.json").is_file():
                beginnings = chain.from_iterable(first_bytes(source.documents(), size) for source, size in texts)
                BPETokenizer.train(first_bytes(beginnings, spec.sample_bytes), spec.vocab_size).save(folder)
            return load_tokenizer(folder)


class MixedSpans(NamedTuple):
    """The spans of each part (packing.Spans); None for a part without any."""

    parts: tuple[Spans | None, ...]

    @property
    def tokens(self) -> int:
        return sum(spans.tokens for spans in self.parts if spans is not None)


@dataclass(frozen=True)
class OpenMixture:
    """The open tokens of a mixture, in place of token_cache.OpenTokens. counts: samples of each part in a block."""

    names: list[str]
    caches: list[OpenTokens]
    counts: np.ndarray
    folder: Path

    @property
    def tokenizer(self) -> Tokenizer:
        return self.caches[0].tokenizer

    @property
    def documents(self) -> int:
        return sum(cache.documents for cache in self.caches)

    @property
    def has_documents(self) -> bool:
        return all(cache.has_documents for cache in self.caches)

    def split(self, *, fraction: float, context: int) -> Split:
        """Each part's own split. Raises UserError, naming the part that is too short."""
        splits = []
        for name, cache in zip(self.names, self.caches, strict=True):
            try:
                splits.append(cache.split(fraction=fraction, context=context))
            except UserError as error:
                raise UserError(f"data.mixture.{name}: {error}") from error
        held_out = MixedSpans(tuple(split.validation for split in splits))
        training = MixedSpans(tuple(split.training for split in splits))
        none = all(spans is None for spans in held_out.parts)
        return Split(training, None if none else held_out)  # type: ignore[arg-type]

    def samples(self, spans: MixedSpans, context: int, document_mask: bool, *, in_proportion: bool) -> MixedSamples:
        """The packed samples of all parts. in_proportion: number them so that the first ones are mixed by weight."""
        parts = [
            None if own is None else PackedSamples(cache.tokens, own, context, document_mask)
            for cache, own in zip(self.caches, spans.parts, strict=True)
        ]
        return MixedSamples(self.names, parts, self.counts, in_proportion=in_proportion)


class MixedSamples:
    """The packed samples of several corpora, numbered one part after the other; a part without samples is None."""

    def __init__(self, names: Sequence[str], parts: Sequence[Any], counts: np.ndarray, *, in_proportion: bool) -> None:
        self.names = names
        self.parts = parts
        self.counts = counts
        self.lengths = np.array([0 if part is None else len(part) for part in parts])
        self.begins = np.concatenate([[0], self.lengths.cumsum()])
        present = [part for part in parts if part is not None]
        self.context = present[0].context
        self.tokens = sum(part.tokens for part in present)
        self._order: np.ndarray | None = None
        if in_proportion:
            places = [(np.arange(size) + 0.5) / count for size, count in zip(self.lengths, counts, strict=True)]
            self._order = np.concatenate(places).argsort(kind="stable")

    def __len__(self) -> int:
        return int(self.begins[-1])

    def __getitem__(self, samples: Sequence[int]) -> Batch:
        """The Batch of these samples, in this order."""
        numbers = np.asarray(samples) if self._order is None else self._order[np.asarray(samples)]
        of_part = np.searchsorted(self.begins, numbers, side="right") - 1
        places = numbers - self.begins[of_part]
        rows = [self.parts[part][[place]] for part, place in zip(of_part, places, strict=True)]
        return cast(Batch, {name: torch.cat([cast(Any, row)[name] for row in rows]) for name in rows[0]})

    def sampler(self, **options: Any) -> MixtureSampler:
        """The sampler of a training run. options: arguments of StepSampler."""
        return MixtureSampler(self.lengths, self.counts, **options)

    def epochs(self, samples: int) -> str:
        """A line on how many epochs of each part these samples are."""
        read = samples * self.counts / BLOCK / self.lengths
        words = (
            f"{name} {often:.2g}" if often < 10 else f"{name} {often:.0f}"
            for name, often in zip(self.names, read, strict=True)
        )
        return "epochs of each source: " + ", ".join(words)


class MixtureSampler(StepSampler):
    """A StepSampler of several parts: the part of sample number n follows from n alone, and each part is read in random
    permutations of its own, one per epoch of that part."""

    def __init__(self, lengths: np.ndarray, counts: np.ndarray, **options: Any) -> None:
        super().__init__(int(lengths.sum()), **options)
        self.lengths = lengths
        self.counts = counts
        self._begins = np.concatenate([[0], lengths.cumsum()])
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # by part: the latest epoch
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # the latest

    def place(self, step: int) -> dict[str, Any]:
        mixture = zlib.crc32(repr((self.lengths.tolist(), self.counts.tolist())).encode())
        return {**super().place(step), "mixture": mixture}

    def chosen(self, numbers: np.ndarray) -> np.ndarray:
        found = np.empty_like(numbers)
        blocks, places = np.divmod(numbers, BLOCK)
        for row, (block, place) in enumerate(zip(blocks.tolist(), places.tolist(), strict=True)):
            parts, earlier = self._block(block)
            part = int(parts[place])
            drawn = block * int(self.counts[part]) + int(earlier[place])
            epoch, index = divmod(drawn, int(self.lengths[part]))
            found[row] = self._begins[part] + int(self._order(part, epoch)[index])
        return found

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """(BLOCK,) each: the part of each number of the block, and how many of that part come before it there."""
        if block not in self._blocks:
            order = epoch_order(BLOCK, self.seed, block, len(self.counts))
            parts = np.repeat(np.arange(len(self.counts)), self.counts)[order]
            earlier = np.empty(BLOCK, dtype=np.int64)
            for part, count in enumerate(self.counts):
                earlier[parts == part] = np.arange(count)
            self._blocks = {block: (parts, earlier)}
        return self._blocks[block]

    def _order(self, part: int, epoch: int) -> np.ndarray:
        if self._orders.get(part, (None,))[0] != epoch:
            self._orders[part] = epoch, epoch_order(int(self.lengths[part]), self.seed, epoch, part)
        return self._orders[part][1]


def block_counts(shares: np.ndarray) -> np.ndarray:
    """(parts,) int64: samples of each part in a block: its share, rounded, and at least one."""
    counts = np.maximum(1, np.floor(shares * BLOCK)).astype(np.int64)
    missing = BLOCK - int(counts.sum())
    if missing < 0:  # many tiny shares were rounded up to one
        counts[counts.argmax()] += missing
    else:
        counts[np.argsort(-(shares * BLOCK - counts), kind="stable")[:missing]] += 1
    return counts
