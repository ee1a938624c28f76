"""Several corpora mixed by weight: each has its token file and its held-out part, and a step draws from all.

N numbers a run's samples through; a block of BLOCK of them holds each part's share exactly, in a random order.

interleave_datasets of datasets 5.2 mixes documents: equal weights of texts of 1,000 and 100 characters gave 91 to 9.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from flashtrain.data.loader import StepSampler, epoch_order
from flashtrain.data.packing import Batch, PackedSamples, Spans, Split, split_documents
from flashtrain.data.sources import TextSource, TokenSource
from flashtrain.data.token_files import open_split
from flashtrain.data.tokenizers import Tokenizer, TokenizerSpec, first_bytes, load_tokenizer, make_tokenizer
from flashtrain.errors import UserError
from flashtrain.files.caches import default_cache_dir, only_writer

BLOCK = 10_000
BLOCKS_KEPT = 4


class Part(NamedTuple):
    """A source of the mixture. weight: its share of the samples, over the sum of all weights."""

    name: str
    source: TextSource | TokenSource
    weight: float


class MixtureSource:
    """Sources by name, with a weight each; all become tokens of one tokenizer.

    A "bpe" is trained on the beginnings of all, as much of each as its weight says.
    """

    def __init__(self, parts: Mapping[str, tuple[TextSource | TokenSource, float]]) -> None:
        self.parts = [Part(name, source, float(weight)) for name, (source, weight) in parts.items()]

    @property
    def shares(self) -> np.ndarray:
        """(parts,) float64: of the samples."""
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
        """Every part's tokens, made where they are missing. Raises UserError."""
        if isinstance(tokenizer, TokenizerSpec) and tokenizer.kind == "bpe":
            tokenizer = self._trained(tokenizer, cache_dir)
        caches = []
        for part in self.parts:
            if isinstance(part.source, TokenSource):
                caches.append(part.source.open_tokens(tokenizer, cache_dir))
            else:
                caches.append(open_split(part.source, tokenizer, cache_dir))
        folder = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
        return OpenMixture([part.name for part in self.parts], caches, block_counts(self.shares), folder)

    def _trained(self, spec: TokenizerSpec, cache_dir: str | os.PathLike[str] | None) -> Tokenizer:
        """A BPE of all parts, trained once: it lies in the cache."""
        base = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
        mixed = _Mixed(self, spec.sample_bytes)
        digest = hashlib.sha256(repr((spec.key(), mixed.fingerprint())).encode()).hexdigest()[:12]
        folder = base / "mixture-tokenizers" / digest
        with only_writer(folder, "data.cache_dir"):
            if not (folder / "tokenizer.json").is_file():
                make_tokenizer(spec, mixed).save(folder)
            return load_tokenizer(folder)


class _Mixed:
    """The beginnings of the mixture's texts, as one source."""

    def __init__(self, mixture: MixtureSource, sample_bytes: int) -> None:
        self._mixture, self._bytes = mixture, sample_bytes

    def _texts(self) -> Iterator[tuple[TextSource, int]]:
        for part, share in zip(self._mixture.parts, self._mixture.shares, strict=True):
            if isinstance(part.source, TokenSource):
                raise UserError(f"data.mixture.{part.name} is tokens already: name the tokenizer that they are of.")
            yield part.source, max(1, int(share * self._bytes))

    def describe(self) -> str:
        return self._mixture.describe()

    def fingerprint(self) -> str:
        return repr([(source.fingerprint(), size) for source, size in self._texts()])

    def documents(self) -> Iterator[str]:
        for source, size in self._texts():
            yield from first_bytes(source.documents(), size)

    def approximate_bytes(self) -> int | None:
        return None


class MixedSpans(NamedTuple):
    """The spans of each part (packing.Spans), None of one that has none."""

    parts: tuple[Spans | None, ...]

    @property
    def tokens(self) -> int:
        return sum(spans.tokens for spans in self.parts if spans is not None)


class Counted(NamedTuple):
    """As of token_cache.CacheMeta."""

    documents: int


@dataclass(frozen=True)
class OpenMixture:
    """What a data module needs of a token cache (token_cache.TokenCache). counts: each part's, of a block."""

    names: list[str]
    caches: list[Any]
    counts: np.ndarray
    folder: Path

    @property
    def tokenizer(self) -> Tokenizer:
        return self.caches[0].tokenizer

    @property
    def meta(self) -> Counted:
        return Counted(sum(cache.meta.documents for cache in self.caches))

    @property
    def has_documents(self) -> bool:
        return all(getattr(cache, "has_documents", True) for cache in self.caches)

    def split(self, *, fraction: float, context: int) -> Split:
        """Each part's own split. Raises UserError, naming the part that is too short."""
        splits = []
        for name, cache in zip(self.names, self.caches, strict=True):
            try:
                if hasattr(cache, "split"):
                    splits.append(cache.split(fraction=fraction, context=context))
                else:
                    splits.append(split_documents(cache.offsets, fraction=fraction, context=context))
            except UserError as error:
                raise UserError(f"data.mixture.{name}: {error}") from error
        held_out = MixedSpans(tuple(split.validation for split in splits))
        training = MixedSpans(tuple(split.training for split in splits))
        none = all(spans is None for spans in held_out.parts)
        return Split(training, None if none else held_out)  # type: ignore[arg-type]

    def samples(self, spans: MixedSpans, context: int, document_mask: bool, *, in_proportion: bool) -> MixedSamples:
        """The parts' packed samples. in_proportion: number them such that the first so many are mixed by weight."""
        parts = [
            None if own is None else PackedSamples(cache.tokens_path, cache.meta.dtype, own, context, document_mask)
            for cache, own in zip(self.caches, spans.parts, strict=True)
        ]
        return MixedSamples(self.names, parts, self.counts, in_proportion=in_proportion)


class MixedSamples:
    """The packed samples of several corpora, numbered through; a part may be None, and has none then."""

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
        rows, batches = [], []
        for number in np.unique(of_part):
            own = np.flatnonzero(of_part == number)
            rows.append(own)
            batches.append(self.parts[number][(numbers[own] - self.begins[number]).tolist()])
        back = torch.from_numpy(np.concatenate(rows).argsort())
        return Batch(
            tokens=torch.cat([batch["tokens"] for batch in batches])[back],
            labels=torch.cat([batch["labels"] for batch in batches])[back],
            documents=torch.cat([batch["documents"] for batch in batches])[back],
            positions=torch.cat([batch["positions"] for batch in batches])[back],
        )

    def sampler(self, _: int, **options: Any) -> MixtureSampler:
        """The order in which a run reads them: see StepSampler's options."""
        return MixtureSampler(self.lengths, self.counts, **options)

    def epochs(self, samples: int) -> str:
        """How often so many samples read each part, in words."""
        read = samples * self.counts / BLOCK / self.lengths
        words = (
            f"{name} {often:.2g}" if often < 10 else f"{name} {often:.0f}"
            for name, often in zip(self.names, read, strict=True)
        )
        return "epochs of each source: " + ", ".join(words)


class MixtureSampler(StepSampler):
    """A StepSampler of several parts: sample number n is of a part that follows from n alone, and each part is read in
    random permutations of its own, one an epoch of it."""

    def __init__(self, lengths: np.ndarray, counts: np.ndarray, **options: Any) -> None:
        super().__init__(int(lengths.sum()), **options)
        self.lengths = lengths
        self.counts = counts
        self._begins = np.concatenate([[0], lengths.cumsum()])
        self._orders: dict[tuple[int, int], np.ndarray] = {}
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def noted(self) -> dict[str, int]:
        return {"mixture": zlib.crc32(repr((self.lengths.tolist(), self.counts.tolist())).encode())}

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
        """(BLOCK,) each: which part a number of the block is of, and how many of that part come before it there."""
        if block not in self._blocks:
            while len(self._blocks) >= BLOCKS_KEPT:
                del self._blocks[min(self._blocks)]
            order = epoch_order(BLOCK, self.seed, block, len(self.counts))
            parts = np.repeat(np.arange(len(self.counts)), self.counts)[order]
            earlier = np.empty(BLOCK, dtype=np.int64)
            for part, count in enumerate(self.counts):
                earlier[parts == part] = np.arange(count)
            self._blocks[block] = parts, earlier
        return self._blocks[block]

    def _order(self, part: int, epoch: int) -> np.ndarray:
        if (part, epoch) not in self._orders:
            for old in [key for key in self._orders if key[0] == part and key[1] < epoch - 1]:
                del self._orders[old]
            self._orders[part, epoch] = epoch_order(int(self.lengths[part]), self.seed, epoch, part)
        return self._orders[part, epoch]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_orders": {}, "_blocks": {}}


def block_counts(shares: np.ndarray) -> np.ndarray:
    """(parts,) int64: how many of BLOCK samples each part has: its share, rounded, and one at least."""
    counts = np.maximum(1, np.floor(shares * BLOCK)).astype(np.int64)
    missing = BLOCK - int(counts.sum())
    if missing < 0:  # many tiny shares took more than their own
        counts[counts.argmax()] += missing
    else:
        counts[np.argsort(-(shares * BLOCK - counts), kind="stable")[:missing]] += 1
    return counts
