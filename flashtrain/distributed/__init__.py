"""Training on several devices: which Lightning strategy a name stands for, and how a model is sharded.

`strategies` (make_strategy, DataParallelStrategy, FullyShardedStrategy, STRATEGIES) and `sharding` (shard,
full_state_dict). The names below are imported when first used: ranks that only compute (context_benchmark)
start without Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "DataParallelStrategy": "flashtrain.distributed.strategies",
    "FullyShardedStrategy": "flashtrain.distributed.strategies",
    "full_state_dict": "flashtrain.distributed.sharding",
    "make_strategy": "flashtrain.distributed.strategies",
    "shard": "flashtrain.distributed.sharding",
}

__all__ = ["DataParallelStrategy", "FullyShardedStrategy", "full_state_dict", "make_strategy", "shard"]

if TYPE_CHECKING:
    from flashtrain.distributed.sharding import full_state_dict, shard
    from flashtrain.distributed.strategies import DataParallelStrategy, FullyShardedStrategy, make_strategy


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'flashtrain.distributed' has no attribute '{name}'")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
