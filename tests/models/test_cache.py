from __future__ import annotations

import pytest
import torch

from flashtrain.errors import UserError
from flashtrain.models.cache import KeyValueCache, LayerCache, next_positions


def test_a_full_cache_refuses_more():
    cache = LayerCache(context=2)
    with pytest.raises(UserError, match=r"3 tokens for a cache of 2"):
        cache.append(torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1, 4))


def test_clearing_forgets_the_tokens_of_every_layer():
    cache = KeyValueCache(layers=2, context=4)
    for layer in cache.layers:
        layer.append(torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1, 4))
    assert cache.length == 3
    cache.clear()
    assert [layer.length for layer in cache.layers] == [0, 0]


def test_positions_count_on_from_the_cache():
    cache = LayerCache(context=4)
    cache.append(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))
    assert next_positions(2, cache, torch.device("cpu")).tolist() == [[2, 3]]
    assert next_positions(2, None, torch.device("cpu")).tolist() == [[0, 1]]
