"""Rules on positions that describe a transformers mask function without
evaluating it for every pair.

transformers (masking_utils) composes a mask function of (batch, head, query, key) from a few known
parts, which give one interval of keys for each query. A function with other parts (a caller's own
overlay) has no rules.

Shapes: B batch, S sequence (Sq queries, Sk keys).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtrain_kernels.masks import documents_from_ids

_MODULE = "transformers.masking_utils"


class Rules(NamedTuple):
    """The conditions under which a query sees a key, in absolute positions; all must
    hold, None is no condition."""

    left: int | None = None  # key >= query - left
    right: int | None = None  # key <= query + right
    chunk: int | None = None  # query and key are in the same chunk of this many tokens
    chunk_start: Tensor | None = None  # (B,), where a row's first chunk begins
    documents: Tensor | None = None  # (B, S) ids; query and key are in the same document
    positions: Tensor | None = None  # (B, S), within the documents


def read(mask_function: Callable[..., Any]) -> Rules | None:
    """Return the rules that describe a transformers mask function; None where
    it has an unknown part."""
    if getattr(mask_function, "__module__", None) != _MODULE:
        return None
    part = mask_function.__qualname__.removesuffix(".<locals>.inner_mask").removesuffix(
        ".<locals>.and_mask"
    )
    held = _held(mask_function)
    if part == "and_masks":
        parts = [read(function) for function in held["mask_functions"]]
        known = [rules for rules in parts if rules is not None]
        return _all_of(known) if len(known) == len(parts) else None
    if part == "causal_mask_function":
        return Rules(right=0)
    if part == "bidirectional_mask_function":
        return Rules()
    if part == "sliding_window_overlay":
        return Rules(left=held["sliding_window"] - 1)
    if part == "sliding_window_bidirectional_overlay":
        return Rules(left=held["sliding_window"], right=held["sliding_window"])
    if part == "chunked_overlay":
        return Rules(chunk=held["chunk_size"], chunk_start=held["left_padding"])
    if part == "packed_sequence_mask_function":
        return Rules(documents=held["packed_sequence_mask"])
    if part == "remap_positions_for_packed_sequence":
        # Positions in a document rise by one per token, so that bounds on their difference
        # are bounds on indices.
        inner = read(held["mask_function"])
        return None if inner is None else inner._replace(positions=held["position_ids"])
    return None


def intervals(
    rules: Rules, query: Tensor, first_key: int, keys: int, batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the interval of keys that each query sees, and the first key of the query's document.

    Args:
        rules: The conditions under which a query sees a key.
        query: Absolute positions of the queries, (Sq,) int64.
        first_key: Absolute position of key 0.
        keys: The number of keys, Sk.
        batch: The number of rows, B.

    Returns:
        (begin, end, document start), each (B, Sq) int32, as indices of keys; `end` is exclusive.
    """
    position = query - first_key
    low, high = torch.zeros_like(position)[None], torch.full_like(position, keys)[None]
    start = low
    if rules.documents is not None:
        bounds = documents_from_ids(rules.documents)
        low, high = bounds.start.to(torch.int64), bounds.end.to(torch.int64)
        start = low
    if rules.chunk is not None:
        counted = query[None] if rules.positions is None else rules.positions
        shift = 0 if rules.chunk_start is None else rules.chunk_start[:, None]
        begin = position - (counted - shift) % rules.chunk
        low, high = torch.maximum(low, begin), torch.minimum(high, begin + rules.chunk)
    if rules.left is not None:
        low = torch.maximum(low, position - rules.left)
    if rules.right is not None:
        high = torch.minimum(high, position + rules.right + 1)
    return _rows(low, keys, batch), _rows(high, keys, batch), _rows(start, keys, batch)


def _all_of(parts: list[Rules]) -> Rules:
    """Return the rules that hold where those of all parts hold."""
    lefts = [part.left for part in parts if part.left is not None]
    rights = [part.right for part in parts if part.right is not None]
    merged = Rules(min(lefts, default=None), min(rights, default=None))
    for part in parts:
        fields = {name: value for name, value in part._asdict().items() if value is not None}
        merged = merged._replace(
            **{name: fields[name] for name in fields if name not in ("left", "right")}
        )
    return merged


def _held(function: Callable[..., Any]) -> dict[str, Any]:
    """A function's closure variables by name."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _rows(values: Tensor, keys: int, batch: int) -> Tensor:
    return values.clamp(0, keys).to(torch.int32).expand(batch, -1)
