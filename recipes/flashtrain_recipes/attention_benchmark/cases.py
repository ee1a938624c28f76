"""The cases of recipe=attention-benchmark: a shape, a mask and features. benchmark.rows
names one of these lists:

grid          every combination of benchmark.seqlens, head_dims and masks
core          common shapes, at which flashtrain is compared with other implementations
paper         the shape in FlashAttention's appendix: batch 16, 8 heads of
              dimension 64, full attention
features      dropout, softcap, ALiBi, bias and masks at 16K
block-sparse  block masks of several densities from 4K to 64K, and full attention
wide          heads of 256 and 512, and of 192 with values of 128
as-called     calls of the public functions, each timed alone with its launching, the most important
              first: batches, packed documents, windows; features, each next to the call without it;
              decoding with a key/value cache

B batch, S sequence (Sq queries, Sk keys), H query heads, K key/value heads, D head dimension (Dv of
values).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from flashtrain.errors import UserError
from flashtrain_recipes.attention_benchmark.settings import (
    BLOCK_SPARSE,
    WITH_DOCUMENTS,
    AttentionSettings,
    MaskName,
    parse_mask,
)

BLOCK_SIZE = 128
SOFTCAP = 30.0
PAGE = 256  # keys of a cache's page: what every implementation takes
# Masks that arguments of a call describe; others are made once a batch.
BY_ARGUMENT = ("full", "causal", "window")
GRID_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
BLOCK_SPARSE_LENGTHS = (4096, 8192, 16384, 32768, 65536)
FEATURE_LENGTH = 16384
FEATURE_MASKS = ("causal-document", "prefix-lm", "shared-question", "global-window")
BIAS_LENGTH = 4096


@dataclass(frozen=True)
class Case:
    """One shape, mask and set of features; a table has a row of it for each
    implementation and direction."""

    batch: int
    heads: int
    seqlen_q: int
    head_dim: int
    mask: str  # a name of settings.MASKS
    kv_heads: int = 0  # 0: as many as heads
    value_dim: int = 0  # head dimension of the values; 0: as head_dim
    seqlen_k: int = 0  # 0: as long as seqlen_q
    dropout: float = 0.0
    dtype_name: str = "bfloat16"
    # Lengths of one row's documents, for masks that have them; (): document_lengths.
    documents: tuple[int, ...] = ()
    density: float = 1.0  # the share of blocks that a random block mask computes
    softcap: float = 0.0  # the bound of the scores; 0: no softcap
    # ALiBi (the usual slopes), sinks (a learnable score a head), deterministic, bias, bias
    # gradient (1, H, Sq, Sk)
    features: tuple[str, ...] = ()
    plans: bool = False  # also time how long making the mask takes
    # Keys in a page of the cache that is decoded with; 0: not in pages; None: no cache.
    page: int | None = None
    # Head dimension of the call without features to measure too; 0: none is measured.
    plain_head_dim: int = 0
    compiled: bool = False  # also measure flashtrain under torch.compile
    as_called: bool = False  # time each call by itself, launching included

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "seqlen_k", self.seqlen_k or self.seqlen_q)
        if self.has_documents and not self.documents:
            object.__setattr__(self, "documents", document_lengths(self.seqlen_q))

    @cached_property
    def mask_name(self) -> MaskName:
        return parse_mask(self.mask)

    @property
    def value_width(self) -> int:
        """The head dimension of the values, Dv."""
        return self.value_dim or self.head_dim

    @property
    def kind(self) -> str:
        return self.mask_name.kind

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype_name)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def has_documents(self) -> bool:
        return self.kind in WITH_DOCUMENTS

    @property
    def is_block_sparse(self) -> bool:
        return self.kind in BLOCK_SPARSE

    @property
    def feature_words(self) -> str:
        """The softcap and features as rows show them, joined by commas; "" for
        a case without any."""
        return ", ".join(([f"softcap {self.softcap:g}"] if self.softcap else []) + [*self.features])

    @property
    def needs(self) -> tuple[str, ...]:
        """The features that a baseline must support to run the case, as ("softcap", "dropout")."""
        values = {"softcap": self.softcap, "dropout": self.dropout, "pages": self.page}
        return (*(word for word, value in values.items() if value), *self.features)

    @property
    def part(self) -> str:
        """The table of rows=as-called that shows the case: "calls", "features" or
        "decoding"; "" for other lists."""
        if not self.as_called:
            return ""
        return (
            "decoding" if self.page is not None else "features" if self.plain_head_dim else "calls"
        )

    @property
    def plain(self) -> Case:
        """The same call without features (softcap, dropout, ...), with which
        the case is compared."""
        return replace(
            self,
            softcap=0.0,
            dropout=0.0,
            features=(),
            head_dim=self.plain_head_dim,
            plain_head_dim=0,
        )

    def columns(self) -> dict[str, Any]:
        own = ("batch", "seqlen_q", "seqlen_k", "heads", "kv_heads", "head_dim", "mask", "dropout")
        found = {name: getattr(self, name) for name in own} | {"dtype": self.dtype_name}
        cache = "" if self.page is None else f"pages of {self.page}" if self.page else "contiguous"
        optional = {
            "value_dim": self.value_dim,
            "cache": cache,
            "features": self.feature_words,
            "part": self.part,
        }
        return found | {name: value for name, value in optional.items() if value}

    def __str__(self) -> str:
        keys = "" if self.seqlen_k == self.seqlen_q else f" on {self.seqlen_k}"
        groups = "" if self.kv_heads == self.heads else f" ({self.kv_heads} KV)"
        values = f", values of {self.value_dim}," if self.value_dim else ""
        extras = [self.feature_words, f"dropout {self.dropout:g}" if self.dropout else ""]
        extras += [f"density {self.density:g}" if self.kind == "block-random" else ""]
        extras += (
            []
            if self.page is None
            else [f"cache in pages of {self.page}" if self.page else "cache"]
        )
        words = ", ".join(part for part in (self.mask, *extras) if part)
        return (
            f"B={self.batch} H={self.heads}{groups} S={self.seqlen_q}{keys} "
            f"D={self.head_dim}{values} {words}"
        )


def flops(case: Case, pairs: float, direction: str) -> float:
    """Return the FLOPs of one call: forward 2 (D + Dv) for each visible pair (two products),
    backward 2 (3 D + 2 Dv) (five products).

    Args:
        pairs: visible (query, key) pairs of one head in one sequence of the batch
            (Context.counted_pairs).
        direction: "forward", or else backward.
    """
    of_d, of_dv = (1, 1) if direction == "forward" else (3, 2)  # products over D, over Dv
    width = of_d * case.head_dim + of_dv * case.value_width
    return 2.0 * case.batch * case.heads * pairs * width


def cases(settings: AttentionSettings) -> list[Case]:
    """Return the cases that the settings select, in the order of measuring. Raises
    UserError where none is left."""
    found = _PRESETS[settings.rows](settings)
    as_called = settings.rows == "as-called"
    found = [replace(case, dtype_name=settings.dtype, as_called=as_called) for case in found]
    # the presets features and block-sparse take the lengths in themselves
    lengths = None if settings.rows in ("features", "block-sparse") else settings.seqlens
    found = [
        case
        for case in found
        if (lengths is None or case.seqlen_q in lengths)
        and (settings.head_dims is None or case.head_dim in settings.head_dims)
        and (settings.masks is None or case.mask in settings.masks)
        and (settings.longest is None or max(case.seqlen_q, case.seqlen_k) <= settings.longest)
    ]
    if not found:
        raise UserError(
            f"benchmark.rows={settings.rows} has no row of these benchmark.seqlens, head_dims and "
            "masks up to benchmark.longest: change them, or leave them out."
        )
    return list(dict.fromkeys(found))


def _grid(settings: AttentionSettings) -> list[Case]:
    found = [
        Case(
            settings.batch or max(1, settings.tokens // length),
            _heads(settings, dim),
            length,
            dim,
            mask,
            density=share,
        )
        for mask in settings.masks or ["full", "causal"]
        for dim in settings.head_dims or [64, 128]
        for length in settings.seqlens or GRID_LENGTHS
        for share in (settings.densities if mask == "block-random" else [1.0])
    ]
    return [replace(case, batch=1) if case.kind.endswith("varlen") else case for case in found]


def _core(settings: AttentionSettings) -> list[Case]:
    full, causal = "full", "causal"
    large = ((4, 16, 4096, 128), (1, 16, 16384, 128), (4, 32, 4096, 64), (1, 32, 16384, 64))
    small = ((64, 256), (32, 512), (8, 2048))
    return [
        *(Case(*sizes, mask) for sizes in large for mask in (full, causal)),
        Case(32, 12, 1024, 64, causal),  # GPT-2 small
        Case(64, 16, 512, 64, full),  # BERT-large
        Case(1, 64, 8192, 128, full, kv_heads=8),
        Case(1, 64, 8192, 128, causal, kv_heads=8),
        Case(1, 64, 8192, 128, full),  # the same work without shared heads
        Case(1, 64, 8192, 128, causal),
        Case(1, 32, 16384, 64, "window-1024"),
        Case(1, 16, 16384, 128, "window-1024"),
        Case(1, 32, 32768, 64, "causal-varlen", documents=document_lengths(32768, 13)),
        Case(2, 8, 8192, 256, causal),
        *(Case(batch, 32, length, 64, causal) for batch, length in small),
        *(Case(batch, 16, length, 128, causal) for batch, length in small),
        Case(1, 16, 65536, 128, causal),
    ]


def _features(settings: AttentionSettings) -> list[Case]:
    found = []
    for head_dim in (64, 128):
        for length in settings.seqlens or [FEATURE_LENGTH]:
            plain = Case(1, _heads(settings, head_dim), length, head_dim, "causal")
            found += [
                plain,
                replace(plain, dropout=0.1),
                replace(plain, softcap=SOFTCAP),
                replace(plain, features=("ALiBi",)),
            ]
            # A bias has S x S elements a head: at 16K it would fill the memory of the
            # smaller GPUs alone.
            shorter = min(length, BIAS_LENGTH)
            short = replace(plain, mask="full", batch=4, seqlen_q=shorter, seqlen_k=shorter)
            found += [replace(short, features=(word,)) for word in ("bias", "bias gradient")]
            found += [replace(plain, mask=mask, plans=True) for mask in FEATURE_MASKS]
    return found


def _block_sparse(settings: AttentionSettings) -> list[Case]:
    found = []
    for head_dim in (64, 128):
        for length in settings.seqlens or BLOCK_SPARSE_LENGTHS:
            if length % BLOCK_SIZE:
                raise UserError(
                    f"benchmark.seqlens={length} with block masks: "
                    f"expected multiples of {BLOCK_SIZE} only."
                )
            dense = Case(
                max(1, settings.tokens // length),
                _heads(settings, head_dim),
                length,
                head_dim,
                "full",
            )
            found.append(dense)
            found += [
                replace(dense, mask="block-random", density=density)
                for density in settings.densities
            ]
            found.append(replace(dense, mask="block-butterfly"))
    return found


def _as_called(settings: AttentionSettings) -> list[Case]:
    documents = document_lengths(32768, low=300, high=6000)
    long = Case(1, 16, 16384, 128, "causal")
    feature, bert = replace(long, plain_head_dim=128), Case(64, 16, 512, 64, "full")
    cache = Case(8, 32, 1, 128, "full", kv_heads=8, seqlen_k=131072, page=0)
    return [
        Case(32, 12, 1024, 64, "causal", compiled=True),  # GPT-2 small
        Case(1, 16, 32768, 128, "causal-varlen", documents=documents, compiled=True),
        bert,  # BERT-large
        Case(64, 16, 256, 128, "causal", compiled=True),
        Case(32, 32, 512, 64, "causal"),
        Case(1, 32, 32768, 64, "causal-varlen", documents=documents),
        long,
        Case(1, 64, 8192, 128, "causal", kv_heads=8),
        Case(1, 32, 32768, 128, "causal-varlen", kv_heads=8, documents=documents),
        Case(1, 32, 16384, 64, "causal"),
        Case(1, 32, 16384, 64, "window-1024"),
        Case(1, 16, 16384, 128, "window-1024"),
        Case(1, 8, 16384, 256, "causal"),
        replace(feature, softcap=SOFTCAP),
        replace(feature, features=("sinks",)),
        replace(feature, dropout=0.1),
        replace(feature, head_dim=96),
        replace(feature, features=("ALiBi",)),
        replace(feature, features=("deterministic",)),
        replace(bert, dropout=0.1, plain_head_dim=64),
        # Kernels that are new may break the GPU for what follows: the least comes after them.
        cache,
        replace(cache, page=PAGE),
        replace(cache, batch=1),
        replace(cache, batch=1, page=PAGE),
        replace(cache, batch=16),
        replace(cache, batch=16, page=PAGE),
        replace(long, mask="full"),
        Case(2, 32, 8192, 128, "causal", kv_heads=8),  # Llama 8B
        Case(1, 32, 16384, 64, "full"),
        Case(4, 16, 4096, 128, "causal"),
        Case(1, 16, 65536, 128, "causal"),
    ]


def _wide(settings: AttentionSettings) -> list[Case]:
    documents = document_lengths(32768, low=300, high=6000)
    packed = Case(1, 16, 32768, 256, "causal-varlen", kv_heads=2, documents=documents)
    row = Case(1, 16, 8192, 256, "causal")
    widest = Case(1, 8, 8192, 512, "causal")
    return [
        packed,
        *(replace(packed, mask=mask) for mask in ("causal-document", "causal-document-zigzag")),
        replace(packed, kv_heads=16),
        replace(row, kv_heads=2),
        replace(row, seqlen_q=16384, seqlen_k=16384),
        replace(row, mask="window-1024"),
        replace(row, softcap=SOFTCAP),
        replace(row, features=("sinks",)),
        widest,
        *(replace(widest, mask=mask) for mask in ("full", "window-1024")),
        replace(packed, heads=8, kv_heads=8, head_dim=512),
        replace(row, heads=8, kv_heads=8),  # which those of 512 are compared with
        replace(row, head_dim=192, value_dim=128),  # multi-head latent attention
        replace(row, head_dim=192),  # the same with values that are padded
    ]


def _heads(settings: AttentionSettings, head_dim: int) -> int:
    # FlashAttention-2's convention: a model of width 2048.
    return settings.heads or max(1, 2048 // head_dim)


_PRESETS: dict[str, Callable[[AttentionSettings], list[Case]]] = {
    "grid": _grid,
    "core": _core,
    "paper": lambda _: [Case(16, 8, length, 64, "full") for length in GRID_LENGTHS],
    "features": _features,
    "block-sparse": _block_sparse,
    "as-called": _as_called,
    "wide": _wide,
}


def document_lengths(
    total: int, count: int | None = None, *, low: int = 0, high: int = 0
) -> tuple[int, ...]:
    """Return random document lengths that add up to `total` tokens, the same each time.

    Args:
        count: number of documents; None: total over the mean of low and high.
        low, high: the shortest and longest length; 0: total / 64 and total / 8.
    """
    draw = random.Random(0)
    low, high = low or max(1, total // 64), high or max(1, total // 8)
    if count is None:
        count = max(1, round(2 * total / (low + high)))
    lengths = [draw.randint(low, high) for _ in range(count)]
    # Move towards the total, a token of a random document at a time at the worst; the
    # range is never left.
    while (short := total - sum(lengths)) != 0:
        index = draw.randrange(count)
        step = max(1, abs(short) // count)
        wanted = lengths[index] + (step if short > 0 else -step)
        lengths[index] = min(high, max(low, wanted))
    return tuple(lengths)
