"""Caches of transformers decoders: for rows of unequal lengths, which decode together, and
transformers' own."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from flashtrain.models.key_value_cache import KeyValueCache, LayerCache
from flashtrain_kernels.arguments import autocasted


class _Layer(LayerCache, DynamicLayer):
    """A LayerCache whose tensors have their heads first, as transformers' do."""

    is_initialized = False

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        # In the dtype of attention: float32 rotary embeddings make float32 keys under autocast.
        k, v = autocasted(key_states.to(value_states.dtype), value_states)
        self.is_initialized = True
        found = self.append(k.transpose(1, 2), v.transpose(1, 2))
        return tuple(one.transpose(1, 2) for one in found)

    @property
    def is_sliding(self) -> bool:  # type: ignore[override]
        return self.room < self.context

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        before = min(self.length, self.room - 1)
        return before + query_length, self.length - before


class HuggingFaceCache(KeyValueCache, Cache):
    """A KeyValueCache that a transformers model takes as past_key_values."""

    def __init__(self, layers: Iterable[Any], tokens: int) -> None:
        windows = [getattr(one.mixer, "window", None) for one in layers]
        Cache.__init__(self, layers=[_Layer(tokens, window) for window in windows])


def own_cache(model: Any) -> Any:
    """Return an empty cache of transformers for a model whose rows are equally long."""
    cache = DynamicCache(config=model.config)
    kind = getattr(sys.modules[type(model).__module__], "MiniMaxCache", None)
    if kind is None:
        return cache
    # MiniMax demands its own, which lacks the kinds of layers by which masks find their length.
    own = kind()
    own.layers, own.linear_cache = cache.layers, [None] * len(cache.layers)
    return own
