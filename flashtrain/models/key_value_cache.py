"""Keys and values of the tokens that a decoder has read, so that the next token is computed alone.

Shapes: B batch, S new tokens, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashtrain.errors import UserError


class LayerCache:
    """The keys and values of one layer; the first append allocates memory for `context` tokens.

    With a window, rows that are read one by one (KeyValueCache.start_row) have memory for its
    tokens alone: token n is in place n % window.
    """

    def __init__(self, context: int, window: int | None = None, *, shared: bool = False) -> None:
        self.context = context
        self.shared = shared  # whether the keys are the values, stored once
        self.window = window  # the tokens that a token sees, itself included; None: all
        self.length = 0  # tokens that were read; of rows that are decoded together, the longest's
        self.rows: int | None = None  # that memory is allocated for; None: those of the first call
        self.row: int | None = None  # the only one that is read; None: all, which are equally long
        # (B,) int32, while rows of unequal lengths are decoded: how many keys the new token sees.
        self.seen: Tensor | None = None
        self.places: Any = None  # with `seen`: (rows, positions) of the new tokens
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def room(self) -> int:
        """The tokens of a row that there is memory for."""
        return min(self.context, self.window or self.context) if self.rows else self.context

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens; use it under torch.no_grad(), since it
        is not differentiable.

        Args:
            k: Keys of the new tokens, (B, S, K, D); one a row while rows are decoded.
            v: Values of the new tokens, (B, S, K, D).

        Returns:
            The keys and the values so far, (B, length, K, D), views into the cache. With a window
            those that the new tokens see, the new ones last; while rows are decoded in any order.

        Raises:
            UserError: There are more tokens than the cache has room for.
        """
        start, end = self.length, self.length + k.shape[1]
        if end > self.context:
            raise UserError(
                f"{end} tokens for a cache of {self.context}: "
                f"expected at most {self.context}. Make a larger one by new_cache(tokens)."
            )
        if self.keys is None or self.values is None:
            rows = k.shape[0] if self.rows is None else self.rows
            self.keys = k.new_empty(rows, self.room, *k.shape[2:])
            self.values = self.keys if self.shared else v.new_empty(rows, self.room, *v.shape[2:])
        room = self.room
        if self.seen is not None:
            row, position = self.places
            at = row, position if room == self.context else position % room
            self.keys[at], self.values[at] = k[:, 0], v[:, 0]
            return self.keys[:, :end], self.values[:, :end]
        own = slice(None) if self.row is None else slice(self.row, self.row + 1)
        self.length = end
        if room == self.context:
            self.keys[own, start:end], self.values[own, start:end] = k, v
            return self.keys[own, :end], self.values[own, :end]
        places = torch.arange(max(0, start - room + 1), end, device=k.device) % room
        earlier, last = places[: -k.shape[1]], places[-room:]
        k = torch.cat([self.keys[own, earlier], k], 1)
        v = torch.cat([self.values[own, earlier], v], 1)
        self.keys[own, last], self.values[own, last] = k[:, -len(last) :], v[:, -len(last) :]
        return k, v


class KeyValueCache:
    """One cache per layer. Pass it to every call of a model's forward, with only
    the new tokens each time.

    Rows of unequal lengths: each is read by itself, after start_row; then decode comes before
    every forward of one further token a row.

    Args:
        layers: What each mixer's spec made (new_cache), such as a LayerCache.
    """

    seen: Tensor | None = None  # as each layer's

    def __init__(self, layers: Iterable[Any]) -> None:
        self.layers = list(layers)

    @property
    def length(self) -> int:
        """The number of tokens in the cache."""
        return self.layers[0].length

    def start_row(self, row: int, rows: int) -> None:
        """Read the tokens of one row, of `rows` in all, by the next calls."""
        self.seen = None
        for layer in self.layers:
            layer.rows, layer.row, layer.length, layer.seen = rows, row, 0, None

    def decode(self, lengths: Sequence[int], device: torch.device) -> Tensor:
        """Read a further token of each row, after these `lengths`, by the next call; return the
        positions (B, 1) of these tokens."""
        positions = torch.tensor(lengths, device=device)
        places = torch.arange(len(lengths), device=device), positions
        self.seen = (positions + 1).int()
        for layer in self.layers:
            layer.length, layer.seen, layer.places = max(lengths), self.seen, places
        return positions[:, None]


def cache_bytes(
    layers: Iterable[Any], tokens: int = 1, dtype: torch.dtype = torch.bfloat16
) -> int | None:
    """Return the bytes of the keys and values of a row of `tokens` tokens in the caches of all
    layers (LayerSpecs), of whose windows only the last tokens are kept; None where rows of unequal
    lengths cannot decode together, so that the caches are others."""
    total = 0
    for mixer in (layer.mixer for layer in layers):
        if (width := getattr(mixer, "cache_width", None)) is None:
            return None
        total += width * min(tokens, mixer.window or tokens)
    return dtype.itemsize * total
