"""Which Lightning strategy a name stands for: auto, ddp, fsdp, context.

`STRATEGIES` is the one place to add another (a name and the function that builds it).
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

# MiB of gradients that are reduced together. Compiled code is cut at every bucket: with torch's 25 two H200s trained
# GPT-2 124M at 0.92 of twice one's speed, with these at 0.96 (recipes/results/gpt2-two-gpus-h200.json).
BUCKET_MIB = 400


class DataParallelStrategy(DDPStrategy):
    """Lightning's DDP as our models need it: a copy of the model on each device, gradients averaged in large buckets
    while the backward goes on."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            # Every parameter takes part in every step of our models: searching for unused ones would cost a graph walk.
            find_unused_parameters=False,
            # Gradients live in the buckets that are reduced: one copy of them less. (static_graph would allow more, but
            # does not go together with accumulating gradients.)
            gradient_as_bucket_view=True,
            # The models' buffers are constants, the same on every rank: sending them before each forward is not needed.
            broadcast_buffers=False,
            bucket_cap_mb=BUCKET_MIB,
            **kwargs,
        )

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        # Not on a stream of its own, as Lightning does for CUDA graphs: each gradient would wait for that stream.
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)


def _fully_sharded(**options: Any) -> Strategy:
    from flashtrain.distributed.sharded_strategy import FullyShardedStrategy

    return FullyShardedStrategy(**options)


def _context(**options: Any) -> Strategy:
    from flashtrain.distributed.context.strategy import ContextParallelStrategy  # a dozen files, for those who need it

    timeout = options.get("timeout_seconds")
    if timeout is not None:
        # The watchdog names who is stuck, so it must end the job before a collective gives up.
        options["timeout"] = max(default_pg_timeout, timedelta(seconds=2 * timeout))
    return ContextParallelStrategy(**options)


STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "ddp": DataParallelStrategy,
    "fsdp": _fully_sharded,
    "context": _context,
}


SHARDING = ("fsdp", "context")
CHECKPOINTS = {"auto": None, "file": False, "sharded": True}  # as ShardsCheckpoints has it


def make_strategy(
    name: str = "auto",
    devices: int | str | list[int] = 1,
    num_nodes: int = 1,
    accelerator: str = "auto",
    checkpoint: str = "file",
    **options: Any,
) -> Strategy | str:
    """The strategy to give to Lightning's Trainer, with the same devices, num_nodes and accelerator.

    name: "auto" is Lightning's single-device strategy for one device and "ddp" for more; "ddp" keeps a copy of the
    model on each device (gloo on CPUs, NCCL on GPUs); "fsdp" shards it (FSDP2); "context" shards it too, and every
    sequence among devices. options: of "context", those of ContextParallelStrategy.
    checkpoint: of "fsdp" and "context", a name of CHECKPOINTS.
    devices: as Trainer's: a number, "auto" or -1 for all, a list or "0,1" for certain ones.
    Raises UserError for an unknown name.
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
    """How many devices of one machine a Trainer's `devices` means."""
    if isinstance(devices, (list, tuple)):
        return len(devices)
    if isinstance(devices, str) and "," in devices:
        return len([part for part in devices.split(",") if part.strip()])
    if str(devices) in ("auto", "-1"):
        return torch.cuda.device_count() if accelerator != "cpu" and torch.cuda.is_available() else 1
    return int(devices)
