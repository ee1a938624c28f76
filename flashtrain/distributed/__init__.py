"""Training on several devices: which Lightning strategy a name stands for, and how a model is sharded.

`strategies` (make_strategy, FullyShardedStrategy, STRATEGIES) and `sharding` (shard, full_state_dict).
"""

from flashtrain.distributed.sharding import full_state_dict, shard
from flashtrain.distributed.strategies import FullyShardedStrategy, make_strategy

__all__ = ["FullyShardedStrategy", "full_state_dict", "make_strategy", "shard"]
