"""Keys and values of the tokens that a decoder has read, so that the next token is computed alone.

Shapes: B batch, S new tokens, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from flashtrain.errors import UserError


class LayerCache:
    """The keys and values of one layer; the first append allocates memory for `context` tokens."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens; use it under torch.no_grad(), since it
        is not differentiable.

        Args:
            k: Keys of the new tokens, (B, S, K, D).
            v: Values of the new tokens, (B, S, K, D).

        Returns:
            The keys and the values of all tokens so far, (B, length, K, D), views into the cache.

        Raises:
            UserError: There are more tokens than the cache has room for.
        """
        start, end = self.length, self.length + k.shape[1]
        if end > self.context:
            raise UserError(
                f"{end} tokens for a cache of {self.context}: "
                f"expected at most {self.context}. Make a larger one by new_cache(tokens)."
            )
        if self._keys is None or self._values is None:
            shape = (k.shape[0], self.context, *k.shape[2:])
            self._keys, self._values = k.new_empty(shape), v.new_empty(shape)
        self._keys[:, start:end] = k
        self._values[:, start:end] = v
        self.length = end
        return self._keys[:, :end], self._values[:, :end]


class KeyValueCache:
    """One cache per layer. Pass it to every call of a model's forward, with only
    the new tokens each time.

    Args:
        layers: What each mixer's spec made (new_cache), such as a LayerCache.
    """

    def __init__(self, layers: Iterable[Any]) -> None:
        self.layers = list(layers)

    @property
    def length(self) -> int:
        """The number of tokens in the cache."""
        return self.layers[0].length
