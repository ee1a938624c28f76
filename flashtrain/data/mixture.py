"""Mix several corpora by weight: a corpus has its own token file and held-out part, and steps
draw from all corpora."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from flashtrain.data.loader import StepSampler, epoch_order
from flashtrain.data.packing import Batch, LengthWeights, PackedSamples, Spans, Split
from flashtrain.data.sources import TextSource, TokenSource
from flashtrain.data.token_cache import OpenTokens, cache_root, open_split
from flashtrain.data.tokenizers import (
    Tokenizer,
    TokenizerSpec,
    first_bytes,
    load_tokenizer,
    make_tokenizer,
)
from flashtrain.errors import UserError
from flashtrain.files.caches import only_writer

# Of so many successive samples of a run, every part has exactly its share, in a random order. Why
# not interleave_datasets of datasets 5.2: it mixes documents, and equal weights of texts of 1,000
# and 100 characters gave 91% and 9% of the text.
BLOCK = 10_000


class MixtureSource:
    """A TokenSource that mixes named sources by weight, all encoded by one tokenizer.

    A "bpe" tokenizer is trained on the beginnings of all sources, of each in
    proportion to its weight.

    Args:
        parts: name -> (source, weight). A source's share of the samples is its weight over
            the sum of all weights.
    """

    def __init__(self, parts: Mapping[str, tuple[TextSource | TokenSource, float]]) -> None:
        self.sources = {name: source for name, (source, _) in parts.items()}
        weights = np.array([weight for _, weight in parts.values()], dtype=np.float64)
        self.shares = weights / weights.sum()  # (parts,) float64

    def describe(self) -> str:
        shares = zip(self.sources.items(), self.shares, strict=True)
        return "mixture of " + ", ".join(
            f"{name} {share:.0%} ({source.describe()})" for (name, source), share in shares
        )

    def open_tokens(
        self, tokenizer: TokenizerSpec | Tokenizer, cache_dir: str | os.PathLike[str] | None
    ) -> OpenMixture:
        """Open the tokens of every part, which are made if they are missing. Raises UserError
        as open_or_build does."""
        if isinstance(tokenizer, TokenizerSpec) and tokenizer.kind == "bpe":
            tokenizer = self._trained(tokenizer, cache_dir)
        caches = [open_split(source, tokenizer, cache_dir) for source in self.sources.values()]
        return OpenMixture(
            list(self.sources), caches, block_counts(self.shares), cache_root(cache_dir)
        )

    def _trained(self, spec: TokenizerSpec, cache_dir: str | os.PathLike[str] | None) -> Tokenizer:
        """Return a BPE trained on the beginnings of all parts, of each in proportion to its share;
        it is saved in the cache."""
        texts = []
        for (name, source), share in zip(self.sources.items(), self.shares, strict=True):
            if isinstance(source, TokenSource):
                raise UserError(
                    f"data.mixture.{name} is tokens already, and data.tokenizer=bpe is trained on "
                    "text. Set data.tokenizer to the tokenizer that made these tokens."
                )
            texts.append((source, max(1, int(share * spec.sample_bytes))))
        key = (spec.key(), repr([(source.fingerprint(), size) for source, size in texts]))
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:12]
        folder = cache_root(cache_dir) / "mixture-tokenizers" / digest
        with only_writer(folder, "data.cache_dir"):
            if not (folder / "tokenizer.json").is_file():
                beginnings = (first_bytes(source.documents(), size) for source, size in texts)
                make_tokenizer(spec, lambda: chain.from_iterable(beginnings)).save(folder)
            return load_tokenizer(folder)


class MixedSpans(NamedTuple):
    """The documents of each part as ranges of its token file; None for a part without any."""

    parts: tuple[Spans | None, ...]

    @property
    def tokens(self) -> int:
        """The number of tokens of all parts."""
        return sum(spans.tokens for spans in self.parts if spans is not None)

    def repeated(self, weights: LengthWeights, seed: int, context: int = 0) -> MixedSpans:
        """Return the documents of each part as often as Spans.repeated does."""
        return MixedSpans(tuple(own and own.repeated(weights, seed, context) for own in self.parts))


@dataclass(frozen=True)
class OpenMixture:
    """The opened tokens of all corpora (parts) of a mixture; used like token_cache.OpenTokens."""

    names: list[str]  # of the parts
    caches: list[OpenTokens]  # of the parts
    counts: np.ndarray  # (parts,) int64, samples of each part in a block
    folder: Path  # of the caches

    @property
    def tokenizer(self) -> Tokenizer:
        return self.caches[0].tokenizer

    @property
    def key(self) -> str:
        return " ".join(cache.key for cache in self.caches)

    @property
    def documents(self) -> int:
        return sum(cache.documents for cache in self.caches)

    @property
    def has_documents(self) -> bool:
        return all(cache.has_documents for cache in self.caches)

    def split(self, *, fraction: float, context: int) -> Split:
        """Hold out documents of each corpus (part) separately. Raises UserError, naming a
        corpus that is too short."""
        splits = []
        for name, cache in zip(self.names, self.caches, strict=True):
            try:
                splits.append(cache.split(fraction=fraction, context=context))
            except UserError as error:
                raise UserError(f"text of data.mixture.{name}: {error}") from error
        held_out = MixedSpans(tuple(split.validation for split in splits))
        training = MixedSpans(tuple(split.training for split in splits))
        none = all(spans is None for spans in held_out.parts)
        return Split(training, None if none else held_out)  # type: ignore[arg-type]

    def samples(
        self, spans: MixedSpans, context: int, document_mask: bool, *, in_proportion: bool
    ) -> MixedSamples:
        """Return the packed samples of all parts. For `in_proportion` see the field of
        MixedSamples."""
        parts = [
            None if own is None else PackedSamples(cache.tokens, own, context, document_mask)
            for cache, own in zip(self.caches, spans.parts, strict=True)
        ]
        return MixedSamples(self.names, parts, self.counts, in_proportion)


@dataclass(eq=False)
class MixedSamples:
    """The packed samples of several corpora (parts), numbered one part after the other."""

    names: Sequence[str]  # of the parts
    parts: Sequence[Any]  # PackedSamples of each part; None for a part without any
    counts: np.ndarray  # (parts,) int64, samples of each part in a block
    # Number the samples so that the first ones, however many, are mixed by weight.
    in_proportion: bool

    def __post_init__(self) -> None:
        self.lengths = np.array([0 if part is None else len(part) for part in self.parts])
        self.begins = np.concatenate([[0], self.lengths.cumsum()])
        present = [part for part in self.parts if part is not None]
        self.context = present[0].context
        self.tokens = sum(part.tokens for part in present)
        self._order: np.ndarray | None = None
        if self.in_proportion:
            places = [
                (np.arange(size) + 0.5) / count
                for size, count in zip(self.lengths, self.counts, strict=True)
            ]
            self._order = np.concatenate(places).argsort(kind="stable")

    def __len__(self) -> int:
        return int(self.begins[-1])

    def __getitem__(self, samples: Sequence[int]) -> Batch:
        """Return the Batch of these samples, in this order."""
        numbers = np.asarray(samples) if self._order is None else self._order[np.asarray(samples)]
        of_part = np.searchsorted(self.begins, numbers, side="right") - 1
        places = numbers - self.begins[of_part]
        rows = [self.parts[part][[place]] for part, place in zip(of_part, places, strict=True)]
        return cast(
            Batch, {name: torch.cat([cast(Any, row)[name] for row in rows]) for name in rows[0]}
        )

    def sampler(self, **options: Any) -> MixtureSampler:
        """Make the sampler of a training run, from the arguments of StepSampler."""
        return MixtureSampler(self.lengths, self.counts, **options)

    def epochs(self, samples: int) -> str:
        """Describe in a line how many epochs of each part a run of `samples` samples reads."""
        read = samples * self.counts / BLOCK / self.lengths
        words = (
            f"{name} {often:.2g}" if often < 10 else f"{name} {often:.0f}"
            for name, often in zip(self.names, read, strict=True)
        )
        return "epochs of each source: " + ", ".join(words)


class MixtureSampler(StepSampler):
    """A StepSampler of several corpora (parts). A part is read in a new random order in
    each of its own epochs.

    Args:
        lengths: (parts,) int64, samples of each part.
        counts: (parts,) int64, samples of each part among BLOCK successive samples of the run.
        **options: Arguments of StepSampler.
    """

    def __init__(self, lengths: np.ndarray, counts: np.ndarray, **options: Any) -> None:
        super().__init__(int(lengths.sum()), **options)
        self.lengths = lengths
        self.counts = counts
        self._begins = np.concatenate([[0], lengths.cumsum()])
        # The latest epoch of each part, and the latest block.
        self._order = lru_cache(maxsize=len(counts))(epoch_order)
        self._block = lru_cache(maxsize=1)(self._drawn)

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
            found[row] = self._begins[part] + int(
                self._order(int(self.lengths[part]), self.seed, epoch, part)[index]
            )
        return found

    def _drawn(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return for each of the BLOCK samples of a block the part that it comes from, and how many
        earlier samples of the block come from the same part; (BLOCK,) integers each."""
        order = epoch_order(BLOCK, self.seed, block, len(self.counts))
        parts = np.repeat(np.arange(len(self.counts)), self.counts)[order]
        earlier = np.empty(BLOCK, dtype=np.int64)
        for part, count in enumerate(self.counts):
            earlier[parts == part] = np.arange(count)
        return parts, earlier


def block_counts(shares: np.ndarray) -> np.ndarray:
    """Return how many of BLOCK successive samples each part gets, (parts,) int64: in proportion to
    `shares`, which add up to 1, and at least one."""
    counts = np.maximum(1, np.floor(shares * BLOCK)).astype(np.int64)
    missing = BLOCK - int(counts.sum())
    if missing < 0:  # many tiny shares were rounded up to one
        counts[counts.argmax()] += missing
    else:
        counts[np.argsort(-(shares * BLOCK - counts), kind="stable")[:missing]] += 1
    return counts
