from __future__ import annotations

import pytest
import torch

from flashtrain.errors import UserError
from flashtrain.models.cache import LayerCache


def test_a_full_cache_refuses_more():
    cache = LayerCache(context=2)
    with pytest.raises(UserError, match=r"3 tokens for a cache of 2"):
        cache.append(torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1, 4))
