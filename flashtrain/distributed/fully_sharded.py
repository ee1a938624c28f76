"""FSDP2 as a Lightning strategy."""

from __future__ import annotations

from flashtrain.distributed.sharded_checkpoints import ShardedCheckpoints


class FullyShardedStrategy(ShardedCheckpoints):
    """FSDP2: weights, gradients and optimizer states are sharded over all devices.

    The LightningModule shards itself in `configure_model`
    (`flashtrain.distributed.sharding.shard`). It works on CPUs with gloo, and on one device. For a
    checkpoint in a single file, rank 0's host memory must hold weights and optimizer states once.

    Args:
        save_distributed_checkpoint: True: checkpoints are folders of shards; False:
            single files; None: by size.
    """

    def setup_environment(self) -> None:
        # Lightning's default is the number of machines; here every device of every
        # machine has a shard.
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()
