"""Which Lightning strategy a name stands for: auto, ddp, fsdp, context.

`STRATEGIES` is the one place to add another (a name and the function that builds it).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from flashtrain.errors import UserError, unknown
from flashtrain.training.checkpoints import readable_checkpoint_errors


class FullyShardedStrategy(ModelParallelStrategy):
    """FSDP2 over all devices: weights, gradients and optimiser states divided among them, one copy in all.

    The LightningModule shards itself in `configure_model` (`flashtrain.distributed.sharding.shard`). Works on CPUs
    with gloo, and on one device. Checkpoints are single files, gathered on rank 0 and written through the Trainer's
    checkpoint plugin (so whole or not at all), read with weights_only=True by every rank, and can be resumed on
    another number of devices; rank 0's host memory must hold weights and optimiser states once.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(data_parallel_size="auto", tensor_parallel_size=1, save_distributed_checkpoint=False, **kwargs)

    def setup_environment(self) -> None:
        # Lightning's "auto" is the number of machines; here every device of every machine holds a shard.
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        with readable_checkpoint_errors(Path(checkpoint_path)):
            return super().load_checkpoint(checkpoint_path, weights_only=True)


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


def _context(**options: Any) -> Strategy:
    from flashtrain.distributed.context.strategy import (
        ContextParallelStrategy,  # a dozen files, for this strategy alone
    )

    timeout = options.get("timeout_seconds")
    if timeout is not None:
        # The watchdog names who is stuck, so it must end the job before a collective gives up.
        options["timeout"] = max(default_pg_timeout, timedelta(seconds=2 * timeout))
    # Single files, as fsdp's: written whole or not at all, and read by everything else.
    return ContextParallelStrategy(save_distributed_checkpoint=False, **options)


STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "ddp": DataParallelStrategy,
    "fsdp": FullyShardedStrategy,
    "context": _context,
}


def make_strategy(
    name: str = "auto",
    devices: int | str | list[int] = 1,
    num_nodes: int = 1,
    accelerator: str = "auto",
    **options: Any,
) -> Strategy | str:
    """The strategy to give to Lightning's Trainer, with the same devices, num_nodes and accelerator.

    name: "auto" is Lightning's single-device strategy for one device and "ddp" for more; "ddp" keeps a copy of the
    model on each device (gloo on CPUs, NCCL on GPUs); "fsdp" shards it (FSDP2); "context" shards it too, and every
    sequence among devices. options: of "context", those of ContextParallelStrategy.
    devices: as Trainer's: a number, "auto" or -1 for all, a list or "0,1" for certain ones.
    Raises UserError for an unknown name or a number of devices below 1.
    """
    if num_nodes < 1:
        raise UserError(f"trainer.num_nodes must be 1 or more, got {num_nodes}")
    count = device_count(devices, accelerator) * num_nodes
    if name == "auto":
        return "auto" if count == 1 else DataParallelStrategy()
    if name not in STRATEGIES:
        raise unknown("strategy", name, ("auto", *STRATEGIES))
    return STRATEGIES[name](**options)


def device_count(devices: int | str | list[int], accelerator: str = "auto") -> int:
    """How many devices of one machine a Trainer's `devices` means. Raises UserError where it means none."""
    if isinstance(devices, (list, tuple)):
        count = len(devices)
    elif isinstance(devices, str) and "," in devices:
        count = len([part for part in devices.split(",") if part.strip()])
    elif str(devices) in ("auto", "-1"):
        count = torch.cuda.device_count() if accelerator != "cpu" and torch.cuda.is_available() else 1
    elif str(devices).lstrip("-").isdigit():
        count = int(devices)
    else:
        raise UserError(f"trainer.devices must be a number, a list or 'auto', got '{devices}'")
    if count < 1:
        raise UserError(f"trainer.devices must be 1 or more, or 'auto', got {devices}")
    return count
