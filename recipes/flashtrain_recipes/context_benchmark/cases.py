"""The cases of recipe=long-context-benchmark: attention of a shape, mask and
length over several devices."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from flashtrain.distributed.context.work import visible_keys
from flashtrain.errors import UserError
from flashtrain_kernels import Mask
from flashtrain_recipes.attention_benchmark.baselines.base import Attend
from flashtrain_recipes.attention_benchmark.baselines.ours import Flashtrain, mask_maker
from flashtrain_recipes.attention_benchmark.cases import Case
from flashtrain_recipes.attention_benchmark.inputs import Context, Inputs
from flashtrain_recipes.attention_benchmark.reference import Expected, expected
from flashtrain_recipes.attention_benchmark.settings import WITH_DOCUMENTS, parse_mask
from flashtrain_recipes.context_benchmark.settings import Shape, parse_shape

LENGTHS = (32768, 131072, 524288)
MASKS = ("causal", "causal-document")
SHAPE = "16x128"
# Lengths of documents: log-normal, of this median and spread, as texts of the web are: nearly all
# between 20 tokens and 20,000. In short sequences the median is a share of the sequence.
SPREAD, MIN_DOCUMENTS, LONGEST = 1.6, 24, 262144


@dataclass(frozen=True)
class ContextCase:
    """Attention over one sequence (batch 1) that is sharded over `degree` devices."""

    attention: Case
    degree: int

    @cached_property
    def mask(self) -> Mask:
        """The mask of the whole sequence, in the host's memory."""
        return mask_maker(self.attention, torch.device("cpu"))()

    @cached_property
    def flops(self) -> float:
        """FLOPs of forward (4 D) and backward (10 D) for each head and visible pair; D
        is the head dimension."""
        return (
            14.0
            * self.attention.heads
            * self.attention.head_dim
            * int(visible_keys(self.mask).sum())
        )

    def attend(self, device: torch.device) -> Attend:
        """Return the function that computes the layer on one device."""
        return Flashtrain().attend(self.attention, Context(self.attention, device))

    def expected(self, inputs: Inputs, device: torch.device) -> Expected:
        """Return the float64 results for the whole sequence."""
        return expected(self.attention, inputs, Context(self.attention, device))

    def columns(self) -> dict[str, Any]:
        one = self.attention
        columns: dict[str, Any] = {
            "mask": one.mask,
            "seqlen": one.seqlen_q,
            "degree": self.degree,
            "heads": one.heads,
            "kv_heads": one.kv_heads,
            "head_dim": one.head_dim,
            "dtype": one.dtype_name,
        }
        if one.documents:
            columns |= {"documents": len(one.documents), "longest_document": max(one.documents)}
        return columns

    def __str__(self) -> str:
        one = self.attention
        return (
            f"{one.mask}, {one.seqlen_q} tokens, {Shape(one.heads, one.kv_heads, one.head_dim)}, "
            f"{self.degree} ranks"
        )


def cases(options: Any, degrees: Sequence[int]) -> list[ContextCase]:
    """Return a case for every requested degree, shape, mask and length, shorter lengths first.

    Raises:
        UserError: every length is above benchmark.longest.
    """
    lengths = sorted(set(options.seqlens or LENGTHS))
    found = [
        ContextCase(_attention(parse_shape(shape), mask, length, options), degree)
        for degree in degrees
        for shape in options.shapes or [SHAPE]
        for mask in options.masks or MASKS
        for length in lengths
        if options.longest is None or length <= options.longest
    ]
    if not found:
        raise UserError(
            f"benchmark.longest={options.longest} is below every length of benchmark.seqlens: "
            "raise it."
        )
    return list(dict.fromkeys(found))


def heavy_tailed_lengths(total: int, seed: int = 0, median: int = 665) -> tuple[int, ...]:
    """Return random log-normal document lengths that add up to `total` tokens;
    equal for equal seeds."""
    draw = random.Random(seed)
    middle = math.log(max(1.0, min(median, total / MIN_DOCUMENTS)))
    lengths: list[int] = []
    left = total
    while left:
        length = min(left, LONGEST, max(1, round(draw.lognormvariate(middle, SPREAD))))
        lengths.append(length)
        left -= length
    return tuple(lengths)


def _attention(shape: Shape, mask: str, length: int, options: Any) -> Case:
    documents: tuple[int, ...] = ()
    if parse_mask(mask).kind in WITH_DOCUMENTS:
        documents = heavy_tailed_lengths(length, median=options.median_document)
    return Case(
        1,
        shape.heads,
        length,
        shape.head_dim,
        mask,
        kv_heads=shape.kv_heads,
        dtype_name=options.dtype,
        documents=documents,
    )
