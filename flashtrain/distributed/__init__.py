"""Training on several devices: which Lightning strategy a name stands for, and how a model is sharded.

`strategies` (make_strategy, DataParallelStrategy, FullyShardedStrategy, STRATEGIES), `sharding` (shard,
full_state_dict), and `context`, whose devices share each sequence.
"""
