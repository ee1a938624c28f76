"""The settings of recipe=long-context-benchmark, in addition to those of attention."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, get_args

from flashtrain.errors import UserError, one_of
from flashtrain.settings.options import ContextLayout, ContextMethod
from flashtrain_recipes.attention_benchmark.settings import BLOCK_SPARSE, MASKS, parse_mask

PLANNED = "planned"  # what trainer.context_parallel_groups=planned does
MIXERS = ("delta", "gla")  # the gated delta rule, and linear attention that only decays
METHODS = get_args(ContextMethod)[1:]  # without auto
# Masks that are no function of a sequence in its order: tables of blocks, and packed
# rows' own functions.
NOT_OVER_DEVICES = ("varlen", "causal-varlen", *BLOCK_SPARSE)


class Shape(NamedTuple):
    """The heads of one attention layer: query heads, key/value heads and head dimension."""

    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        shared = "" if self.kv_heads == self.heads else f"/{self.kv_heads}"
        return f"{self.heads}{shared}x{self.head_dim}"


@dataclass
class ContextSettings:
    """Which attention is measured over how many devices."""

    # Heads x head dimension, as "16x128" (null) or "32/8x128", of 8 key/value heads.
    shapes: list[str] | None = None
    methods: list[str] | None = None  # the context-parallel methods to measure; null: all
    # Layers with states that are measured instead of attention: delta, gla; null: attention.
    mixers: list[str] | None = None
    # The layouts of the sequence over the devices to measure; null: all but planned (by documents).
    layouts: list[str] | None = None
    # How many devices share a sequence; null: 2, 4 and 8, if there are so many.
    degrees: list[int] | None = None
    # The most tokens timed on one device; beyond, its FLOP rate is used.
    one_device_longest: int = 131072
    # The most tokens at which results and gradients are compared with float64.
    check_longest: int = 32768
    # The median of packed documents' tokens.
    median_document: int = 665

    def check_context(self, masks: list[str] | None) -> None:
        """Raise UserError for the first invalid setting, or for a mask that cannot
        be sharded over devices."""
        for method in self.methods or []:
            one_of("benchmark.methods", method, METHODS)
        for layout in self.layouts or []:
            one_of("benchmark.layouts", layout, (*get_args(ContextLayout), PLANNED))
        for mixer in self.mixers or []:
            one_of("benchmark.mixers", mixer, MIXERS)
        for text in self.shapes or []:
            parse_shape(text)
        for name in masks or []:
            if parse_mask(name).kind in NOT_OVER_DEVICES:
                possible = ", ".join(mask for mask in MASKS if mask not in NOT_OVER_DEVICES)
                raise UserError(
                    f"benchmark.masks: {name} cannot be sharded over devices. "
                    f"Expected one of: {possible}."
                )


def parse_shape(text: str) -> Shape:
    """Read an entry of benchmark.shapes: "32/8x128" is 32 query heads, 8 key/value heads
    and head dimension 128.

    "16x128" has as many key/value heads as query heads. Raises UserError for any other text.
    """
    from flashtrain_kernels.arguments import MAX_HEAD_DIM  # which imports torch

    found = re.fullmatch(r"([1-9]\d*)(?:/([1-9]\d*))?x([1-9]\d*)", text)
    if found:
        shape = Shape(*(int(part) for part in (found[1], found[2] or found[1], found[3])))
        if shape.heads % shape.kv_heads == 0 and shape.head_dim <= MAX_HEAD_DIM:
            return shape
    raise UserError(
        f"benchmark.shapes: '{text}' is no shape. Expected heads x head dimension (at "
        f"most {MAX_HEAD_DIM}) as 16x128, or as 32/8x128 for 32 query heads that share 8 "
        "key/value heads."
    )
