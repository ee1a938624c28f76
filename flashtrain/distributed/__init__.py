"""Training on several devices: DDP, FSDP2, and context parallelism (in `context`).

The names below are imported when first used, so that ranks which only compute (context_benchmark) start without
Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashtrain import import_when_used

if TYPE_CHECKING:
    from flashtrain.distributed.sharded_strategy import FullyShardedStrategy as FullyShardedStrategy
    from flashtrain.distributed.sharding import full_state_dict as full_state_dict
    from flashtrain.distributed.sharding import shard as shard
    from flashtrain.distributed.strategies import DataParallelStrategy as DataParallelStrategy
    from flashtrain.distributed.strategies import make_strategy as make_strategy

_HOMES = {
    "full_state_dict": "sharding",
    "shard": "sharding",
    "DataParallelStrategy": "strategies",
    "FullyShardedStrategy": "sharded_strategy",
    "make_strategy": "strategies",
}
__all__ = [*_HOMES]
__getattr__ = import_when_used(__name__, _HOMES)
