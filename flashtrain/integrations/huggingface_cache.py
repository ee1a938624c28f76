"""A transformers decoder's cache for rows of unequal lengths, which decode together."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

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

    def get_seq_length(self) -> int:
        return self.length


class HuggingFaceCache(KeyValueCache, Cache):
    """A KeyValueCache that a transformers model takes as past_key_values."""

    def __init__(self, layers: int, tokens: int) -> None:
        Cache.__init__(self, layers=[_Layer(tokens) for _ in range(layers)])
