"""The Lightning strategies by name: auto, ddp, fsdp, context.

To add another, enter its name and the function that builds it in `STRATEGIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from pytorch_lightning.strategies import DDPStrategy, Strategy
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from flashtrain.errors import unknown

# MiB of gradients that are reduced together. Every bucket is a graph break in compiled code: with torch's 25 two H200s
# trained GPT-2 124M at 0.92 of twice one GPU's speed, with 400 at 0.96 (recipes/results/gpt2-two-gpus-h200.json).
BUCKET_MIB = 400
SHARDING = ("fsdp", "context")  # the strategies that shard a model
CHECKPOINTS = {"auto": None, "file": False, "sharded": True}  # ShardsCheckpoints' save_distributed_checkpoint


class DataParallelStrategy(DDPStrategy):
    """Lightning's DDP with options for our models; gradients are averaged in large buckets during the backward."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            # Our models use every parameter in every step: a search for unused ones would cost a graph walk.
            find_unused_parameters=False,
            # Gradients lie in the buckets that are reduced, which saves a copy. (static_graph would save more, but does
            # not work with gradient accumulation.)
            gradient_as_bucket_view=True,
            # The models' buffers are constants, the same on every rank: no broadcast before each forward.
            broadcast_buffers=False,
            bucket_cap_mb=BUCKET_MIB,
            **kwargs,
        )

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        # Not on a separate stream, as Lightning does for CUDA graphs: each gradient would wait for that stream.
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)


def _fully_sharded(**options: Any) -> Strategy:
    from flashtrain.distributed.sharded_strategy import FullyShardedStrategy

    return FullyShardedStrategy(**options)


def _context(**options: Any) -> Strategy:
    from flashtrain.distributed.context.strategy import ContextParallelStrategy  # imported only if used: a dozen files

    timeout = options.get("timeout_seconds")
    if timeout is not None:
        # The watchdog reports which rank is stuck, so it must end the job before a collective times out.
        options["timeout"] = max(default_pg_timeout, timedelta(seconds=2 * timeout))
    return ContextParallelStrategy(**options)


STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "ddp": DataParallelStrategy,
    "fsdp": _fully_sharded,
    "context": _context,
}


def make_strategy(
    name: str = "auto",
    devices: int | str | list[int] = 1,
    num_nodes: int = 1,
    accelerator: str = "auto",
    checkpoint: str = "file",
    **options: Any,
) -> Strategy | str:
    """The strategy for Lightning's Trainer, which must get the same devices, num_nodes and accelerator.

    Args:
        name: "ddp" has a copy of the model on each device (gloo on CPUs, NCCL on GPUs); "fsdp" shards the model
            (FSDP2); "context" also shards every sequence; "auto" is "ddp", or on one device Lightning's default.
        devices: a number, "auto" or -1 for all, a list or "0,1" for certain ones.
        num_nodes, accelerator: as the Trainer's.
        checkpoint: of "fsdp" and "context", a key of CHECKPOINTS.
        options: of "context", ContextParallelStrategy's.

    Raises:
        UserError: an unknown name.
    """
    count = device_count(devices, accelerator) * num_nodes
    if name == "auto":
        return "auto" if count == 1 else DataParallelStrategy()
    if name not in STRATEGIES:
        raise unknown("strategy", name, ("auto", *STRATEGIES))
    if name in SHARDING:
        options["save_distributed_checkpoint"] = CHECKPOINTS[checkpoint]
    return STRATEGIES[name](**options)


def device_count(devices: int | str | list[int], accelerator: str = "auto") -> int:
    """The number of devices per machine that a Trainer's `devices` stands for."""
    if isinstance(devices, (list, tuple)):
        return len(devices)
    if isinstance(devices, str) and "," in devices:
        return len([part for part in devices.split(",") if part.strip()])
    if str(devices) in ("auto", "-1"):
        return torch.cuda.device_count() if accelerator != "cpu" and torch.cuda.is_available() else 1
    return int(devices)
