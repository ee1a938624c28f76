"""The settings that recipe=long-context-benchmark has besides those of attention."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, get_args

from flashtrain.errors import UserError, one_of
from flashtrain.settings.options import ContextLayout, ContextWay
from flashtrain_recipes.attention_benchmark.settings import BLOCK_SPARSE, MASKS, parse_mask

WAYS = get_args(ContextWay)[1:]  # without auto
# Masks that are no function of a sequence in its order: tables of blocks, and packed rows' own functions.
NOT_OVER_DEVICES = ("varlen", "causal-varlen", *BLOCK_SPARSE)


class Shape(NamedTuple):
    """Heads of one layer: query heads, key/value heads, head dimension."""

    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        shared = "" if self.kv_heads == self.heads else f"/{self.kv_heads}"
        return f"{self.heads}{shared}x{self.head_dim}"


@dataclass
class ContextSettings:
    """shapes: as "16x128" (heads x head dimension) or "32/8x128" (32 query, 8 key/value heads); None: 16x128.
    ways, layouts: of flashtrain's attention, None: all. degrees: devices that share a sequence.
    one_device_longest: up to this length the same attention is measured on one device too, beyond it that time follows
    from the FLOP rate at the longest length measured, and is marked. check_longest: up to this length results and
    gradients are compared with float64.
    """

    shapes: list[str] | None = None
    ways: list[str] | None = None
    layouts: list[str] | None = None
    degrees: list[int] | None = None
    one_device_longest: int = 131072
    check_longest: int = 32768

    def check_context(self, masks: list[str] | None) -> None:
        """Raise UserError for the first of these settings that cannot be, or of the masks over several devices."""
        for way in self.ways or []:
            one_of("benchmark.ways", way, WAYS)
        for layout in self.layouts or []:
            one_of("benchmark.layouts", layout, get_args(ContextLayout))
        for text in self.shapes or []:
            parse_shape(text)
        for name in masks or []:
            if parse_mask(name).kind in NOT_OVER_DEVICES:
                possible = ", ".join(mask for mask in MASKS if mask not in NOT_OVER_DEVICES)
                raise UserError(f"benchmark.masks: {name} over several devices. Expected one of: {possible}.")


def parse_shape(text: str) -> Shape:
    """What an entry of benchmark.shapes means. Raises UserError for one that cannot be."""
    found = re.fullmatch(r"(\d+)(?:/(\d+))?x(\d+)", text)
    if found is None:
        raise UserError(f"benchmark.shapes: '{text}' is no shape. Expected 16x128, or 32/8x128 with shared heads.")
    heads, head_dim = int(found[1]), int(found[3])
    kv_heads = int(found[2] or heads)
    if not (1 <= kv_heads <= heads and heads % kv_heads == 0 and 1 <= head_dim <= 256):
        raise UserError(
            f"benchmark.shapes: '{text}' cannot be. Expected key/value heads that divide the query heads, and head "
            "dimensions of 1 to 256."
        )
    return Shape(heads, kv_heads, head_dim)
