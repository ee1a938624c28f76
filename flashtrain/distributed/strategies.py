"""The Lightning strategies by name: ddp, fsdp, context_parallel."""

from __future__ import annotations

from typing import Any

from pytorch_lightning.strategies import DDPStrategy, Strategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# MiB of gradients that are reduced together. Every bucket is a graph break in compiled code: with
# torch's 25 two H200s trained GPT-2 124M at 0.92 of twice one GPU's speed, with 400 at 0.96
# (recipes/results/gpt2-two-gpus-h200.json).
BUCKET_MIB = 400
# ShardedCheckpoints' save_distributed_checkpoint.
CHECKPOINTS = {"auto": None, "file": False, "sharded": True}


class DataParallelStrategy(DDPStrategy):
    """Lightning's DDP for models that use all parameters in each step; gradients are
    averaged in large buckets."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            # Our models use every parameter in every step: a search for unused ones
            # would cost a graph walk.
            find_unused_parameters=False,
            # Gradients lie in the buckets that are reduced, which saves a copy. (static_graph would
            # save more, but does not work with gradient accumulation.)
            gradient_as_bucket_view=True,
            # The models' buffers are constants, the same on every rank: no broadcast
            # before each forward.
            broadcast_buffers=False,
            bucket_cap_mb=BUCKET_MIB,
            **kwargs,
        )

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        # Not on a separate stream, as Lightning does for CUDA graphs: each gradient would
        # wait for that stream.
        return DistributedDataParallel(
            model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs
        )


def make_strategy(name: str, checkpoint: str = "file", **options: Any) -> Strategy:
    """Make the strategy for Lightning's Trainer.

    Args:
        name: "ddp" or "auto" (a copy of the model on each device; gloo on CPUs, NCCL on
            GPUs), "fsdp" (shards the model, FSDP2) or "context_parallel" (shards the
            model and every sequence).
        checkpoint: for "fsdp" and "context_parallel": "file", "sharded", or "auto"
            (sharded for large models).
        options: for "context_parallel": keyword arguments of ContextParallelStrategy.
    """
    if name in ("auto", "ddp"):
        return DataParallelStrategy()
    sharded = CHECKPOINTS[checkpoint]
    if name == "fsdp":
        from flashtrain.distributed.sharded_checkpoints import FullyShardedStrategy

        return FullyShardedStrategy(save_distributed_checkpoint=sharded)
    from flashtrain.distributed.context.strategy import ContextParallelStrategy

    return ContextParallelStrategy(save_distributed_checkpoint=sharded, **options)
