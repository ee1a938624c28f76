"""Keys and values of the tokens already read, so that generating one more token reads only that token.

Shapes: B batch, S new tokens, K key/value heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.models.spread import spread_sequence


class LayerCache:
    """The keys and values of one layer, in memory allocated once, at the first append, for `context` tokens."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds k and v (B, S, K, D); returns all keys and values so far (B, length, K, D), views into the cache.

        Not differentiable: for generation, under torch.no_grad(). UserError: more tokens than the cache holds.
        """
        start, end = self.length, self.length + k.shape[1]
        if end > self.context:
            raise UserError(f"{end} tokens for a cache of {self.context}. Possible: at most {self.context} tokens.")
        if self._keys is None or self._values is None:
            shape = (k.shape[0], self.context, *k.shape[2:])
            self._keys, self._values = k.new_empty(shape), v.new_empty(shape)
        self._keys[:, start:end] = k
        self._values[:, start:end] = v
        self.length = end
        return self._keys[:, :end], self._values[:, :end]


class KeyValueCache:
    """One LayerCache a layer. Pass it to a model's forward again and again with only the new tokens each time."""

    def __init__(self, layers: int, context: int) -> None:
        self.layers = [LayerCache(context) for _ in range(layers)]

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.layers[0].length

    def clear(self) -> None:
        """Forgets every token; the memory is kept for the next ones (of the same batch size, dtype and device)."""
        for layer in self.layers:
            layer.length = 0


def next_positions(tokens: int, cache: KeyValueCache | LayerCache | None, device: torch.device) -> Tensor:
    """Positions of the next tokens when none are given: counting on from the cache. int64, (1, S).

    Of a sequence spread over several devices: where this device's tokens stand in it, (B or 1, S).
    """
    spread = spread_sequence()
    if spread is not None and cache is None:
        return spread.positions(tokens, device)
    start = cache.length if cache is not None else 0
    return torch.arange(start, start + tokens, device=device)[None]
