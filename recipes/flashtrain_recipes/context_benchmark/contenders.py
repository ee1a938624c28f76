"""What is measured: attention of a shape, mask and length over so many devices; and the ways of sharing it in a layout.

B batch (1), S sequence, n tokens a rank holds, R ranks (the degree), H query heads, K key/value heads, D head
dimension.
"""

from __future__ import annotations

import contextlib
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flashtrain.distributed.context import local_attention
from flashtrain.distributed.context.attention import SharedAttention
from flashtrain.distributed.context.layout import Layout, make_layout, visible_keys
from flashtrain.distributed.context.ways import ALL_TO_ALL, Choice, Traffic, choose_for, choose_way
from flashtrain.errors import UserError
from flashtrain_kernels import Mask
from flashtrain_recipes.attention_benchmark.baselines.ours import mask_maker
from flashtrain_recipes.attention_benchmark.cases import Case
from flashtrain_recipes.attention_benchmark.settings import (
    CONTEXT_LAYOUTS,
    CONTEXT_WAYS,
    WITH_DOCUMENTS,
    BenchmarkSettings,
    Shape,
    parse_mask,
    parse_shape,
)
from flashtrain_recipes.context_benchmark.ranks import Team

LENGTHS = (32768, 131072, 524288)
MASKS = ("causal", "causal-document")
# Lengths of documents: log-normal, of this median and spread, as texts of the web are; one is rarely far from 20 tokens
# or 20,000. In short sequences the median is a share of the sequence.
MEDIAN_TOKENS, SPREAD, LEAST_DOCUMENTS = 665, 1.6, 24


@dataclass(frozen=True)
class ContextCase:
    """attention: one row (batch 1). degree: devices that share it."""

    attention: Case
    degree: int

    @cached_property
    def mask(self) -> Mask:
        """The whole sequence's, on the host."""
        return mask_maker(self.attention, torch.device("cpu"))()

    @cached_property
    def pairs(self) -> int:
        """(query, key) pairs that a head computes."""
        return int(visible_keys(self.mask).sum())

    @property
    def flops(self) -> float:
        """Of forward and backward: 4 D and 10 D for each pair and head."""
        return 14.0 * self.attention.heads * self.attention.head_dim * self.pairs

    @property
    def family(self) -> tuple[Any, ...]:
        """What cases share that differ by length and degree alone."""
        one = self.attention
        return (one.mask, one.heads, one.kv_heads, one.head_dim, one.dtype_name)

    def columns(self) -> dict[str, Any]:
        """The case as the columns of a row."""
        one = self.attention
        told: dict[str, Any] = {
            "mask": one.mask,
            "seqlen": one.seqlen_q,
            "degree": self.degree,
            "heads": one.heads,
            "kv_heads": one.kv_heads,
            "head_dim": one.head_dim,
            "dtype": one.dtype_name,
        }
        if one.documents:
            told |= {"documents": len(one.documents), "longest_document": max(one.documents)}
        return told

    def __str__(self) -> str:
        one = self.attention
        return f"{one.mask}, {one.seqlen_q} tokens, {Shape(one.heads, one.kv_heads, one.head_dim)}, {self.degree} ranks"


def cases(asked: BenchmarkSettings, degrees: Sequence[int]) -> list[ContextCase]:
    """Every shape, mask, length (the shorter first) and degree asked for. Raises UserError where none is left."""
    lengths = sorted(set(asked.seqlens or LENGTHS))
    if asked.longest is not None:
        lengths = [length for length in lengths if length <= asked.longest]
    found = [
        ContextCase(_attention(shape, mask, length, asked.dtype), degree)
        for shape in shapes(asked)
        for mask in asked.masks or MASKS
        for length in lengths
        for degree in degrees
    ]
    if not found:
        raise UserError(f"benchmark.longest={asked.longest} leaves none of the lengths. Possible: a longer one.")
    return list(dict.fromkeys(found))


def shapes(asked: BenchmarkSettings) -> list[Shape]:
    """benchmark.shapes, or those of heads, kv_heads and head_dims: by default a model of width 2048, heads of 128."""
    if asked.shapes is not None:
        return [parse_shape(text) for text in asked.shapes]
    found = []
    for head_dim in asked.head_dims or [128]:
        heads = asked.heads or max(1, 2048 // head_dim)
        kv_heads = asked.kv_heads or heads
        if heads % kv_heads:
            raise UserError(f"benchmark.kv_heads={kv_heads} does not divide the {heads} heads of {head_dim}.")
        found.append(Shape(heads, kv_heads, head_dim))
    return found


def heavy_tailed_lengths(total: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths of documents that fill `total` tokens, log-normal, the last one cut; the same for a seed everywhere."""
    draw = random.Random(seed)
    middle = math.log(max(1.0, min(MEDIAN_TOKENS, total / LEAST_DOCUMENTS)))
    lengths: list[int] = []
    left = total
    while left:
        length = min(left, max(1, round(draw.lognormvariate(middle, SPREAD))))
        lengths.append(length)
        left -= length
    return tuple(lengths)


def _attention(shape: Shape, mask: str, length: int, dtype: str) -> Case:
    documents = heavy_tailed_lengths(length) if parse_mask(mask).kind in WITH_DOCUMENTS else ()
    return Case(
        1, shape.heads, length, shape.head_dim, mask, kv_heads=shape.kv_heads, dtype_name=dtype, documents=documents
    )


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Place:
    """Where a case is computed: the team, the mask of the whole sequence on its device, and the layouts by name."""

    def __init__(self, case: ContextCase, team: Team) -> None:
        self.case, self.team = case, team
        on_host = case.mask
        self.mask: Mask = on_host._replace(queries=on_host.queries.to(team.device))
        self._layouts: dict[str, Layout] = {}

    def layout(self, name: str) -> Layout:
        if name not in self._layouts:
            self._layouts[name] = make_layout(name, self.case.mask, self.case.degree)
        return self._layouts[name]


@dataclass(frozen=True)
class Contender(ABC):
    """One implementation. name: in benchmark.implementations. way: in words. layout: a layout's name."""

    name: str
    way: str
    layout: str

    # Whether it does what it communicates through distributed.context.call, so that its computing can be left out.
    separable = False
    ours = False

    @property
    def title(self) -> str:
        return f"{self.way}, {self.layout}"

    def missing(self, device_type: str) -> str | None:
        """Why it cannot be had at all on such devices; None where it can."""
        return None

    def applies(self, case: ContextCase) -> bool:
        """False where another of the same name is for such a case: this one is left out without a word."""
        return True

    def refuses(self, case: ContextCase) -> str | None:
        """What of the case it does not have, in words; None where it may be tried."""
        return None

    @abstractmethod
    def attend(self, place: Place, q: Tensor, k: Tensor, v: Tensor) -> Attend:
        """A function of this rank's q (B, n, H, D), k and v (B, n, K, D) that returns its out, differentiable."""

    def within(self, place: Place) -> contextlib.AbstractContextManager[None]:
        """Entered around everything that is computed with it."""
        return contextlib.nullcontext()

    def traffic(self, place: Place) -> Traffic | None:
        """Bytes that the busiest rank sends; None where that is not known."""
        return None

    def computing_together(self, case: ContextCase) -> int:
        """Neighbouring ranks that compute all of each other's tokens, some heads each: their work is even."""
        return 1


@dataclass(frozen=True)
class Ours(Contender):
    """flashtrain.distributed.context, by one of its ways."""

    separable = True
    ours = True

    def choice(self, case: ContextCase) -> Choice:
        one = case.attention
        return choose_way(
            self.way, degree=case.degree, heads=one.heads, kv_heads=one.kv_heads, head_dim=one.head_dim, held=1
        )

    def refuses(self, case: ContextCase) -> str | None:
        try:
            self.choice(case)
        except UserError as error:
            return str(error)
        return None

    def attend(self, place: Place, q: Tensor, k: Tensor, v: Tensor) -> Attend:
        layout, group = place.layout(self.layout), place.team.group
        shared = SharedAttention(place.mask, layout, group, q, k, way=self.way, dropout=False)
        scale = place.case.attention.scale
        return lambda q, k, v: shared.__call__(q, k, v, softmax_scale=scale)

    def traffic(self, place: Place) -> Traffic:
        layout, one = place.layout(self.layout), place.case.attention
        chosen = choose_for(
            place.mask, layout, self.way, dropout=False, heads=one.heads, kv_heads=one.kv_heads, head_dim=one.head_dim,
            held=layout.held, bytes_each=one.dtype.itemsize,
        )  # fmt: skip
        return chosen.choice.traffic

    def computing_together(self, case: ContextCase) -> int:
        return self.choice(case).heads_degree


def our_contenders(ways: Sequence[str] | None, layouts: Sequence[str] | None) -> list[Contender]:
    """Every way in every layout, in the order of settings.py; all-to-all, which computes alike in each, in one only."""
    chosen = [layout for layout in CONTEXT_LAYOUTS if layouts is None or layout in layouts]
    return [
        Ours("flashtrain", way, layout)
        for way in CONTEXT_WAYS
        if ways is None or way in ways
        for layout in (chosen[:1] if way == ALL_TO_ALL else chosen)
    ]


def evenly_dealt(case: ContextCase) -> str | None:
    """Why a case does not fit implementations without padding: head-tail chunks must be equal."""
    length, chunks = case.attention.seqlen_q, 2 * case.degree
    return f"{length} tokens are no multiple of {chunks}" if length % chunks else None


def leaves_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors as leaves that want gradients."""
    return [x.detach().contiguous().requires_grad_() for x in tensors]


def gradients(out: Tensor, leaves: Sequence[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, list(leaves), dout)


@contextmanager
def only_communicating() -> Iterator[None]:
    """Within it, the kernels' two passes of every way return zeros of the right shapes at once.

    All that the ways do besides calling them stays as it is. The results are meaningless.
    """
    before = local_attention.forward, local_attention.backward
    local_attention.forward, local_attention.backward = _forward, _backward
    try:
        yield
    finally:
        local_attention.forward, local_attention.backward = before


def _forward(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=local_attention.summing_dtype(q.dtype))
    return q.new_zeros(q.shape), lse


def _backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
