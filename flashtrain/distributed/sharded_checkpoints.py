"""Checkpoints of the strategies that shard a model: single files, or folders of shards."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any, cast

import torch
from pytorch_lightning.strategies import ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.utils._pytree import tree_map

from flashtrain.errors import UserError
from flashtrain.training import sharded
from flashtrain.training.checkpoints import read_checkpoint, rebuild_paths

# Trainable parameters from which "auto" writes shards: a single file has 12 GB with AdamW's states.
LARGE = 10**9
log = logging.getLogger(__name__)


class ShardedCheckpoints(ModelParallelStrategy):
    """Writes checkpoints as single files or as folders of shards, and reads both on
    any number of devices.

    A file is gathered on rank 0 and written by the Trainer's checkpoint plugin. A folder
    (training/sharded.py) is written while training continues; the next checkpoint, and the end of
    the fit, wait until it is complete.

    Args:
        save_distributed_checkpoint: True: folders; False: files; None: folders for models of
            LARGE parameters or more.
        options: ModelParallelStrategy's keyword arguments.
    """

    def __init__(self, save_distributed_checkpoint: bool | None = False, **options: Any) -> None:
        super().__init__(**options)
        # Lightning's attribute.
        self._save_distributed_checkpoint: Any = save_distributed_checkpoint
        self._writer = sharded.ShardWriter()

    @property
    def _writes_shards(self) -> bool:
        if self._save_distributed_checkpoint is None:
            parameters = list(self._whole_module.parameters())
            large = (
                sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
                >= LARGE
            )
            values = [
                state.values()
                for optimizer in self.optimizers
                for state in optimizer.state.values()
            ]
            states = [
                value
                for of_parameter in values
                for value in of_parameter
                if isinstance(value, torch.Tensor)
            ]
            self._save_distributed_checkpoint = large and all(
                _is_plain(tensor) for tensor in parameters + states
            )
        return self._save_distributed_checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self._writes_shards:
            return super().lightning_module_state_dict()
        return states.get_model_state_dict(self._whole_module)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if not self._writes_shards:
            return tree_map(_plain, super().optimizer_state(optimizer))
        return states.get_optimizer_state_dict(
            self._whole_module, getattr(optimizer, "_optimizer", optimizer)
        )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        path = Path(self.broadcast(filepath))
        self._writer.finish()
        if not self._writes_shards:
            return Strategy.save_checkpoint(self, checkpoint, path, storage_options)
        plain, tensors = sharded.split(checkpoint, _tied(self._whole_module))
        odd = next((name for name, tensor in tensors.items() if not _is_plain(tensor)), None)
        if odd is not None:
            raise UserError(
                f"{odd} cannot be saved in a sharded checkpoint: safetensors does not support its "
                "kind of tensor. Use trainer.checkpoint_format=file."
            )
        generation = self.broadcast(sharded.next_generation(path, checkpoint.get("global_step", 0)))
        self._writer.start(plain, tensors, path, generation)
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is None or trainer.state.fn != "fit" or trainer.state.status != "running":
            self._writer.finish()  # no training continues meanwhile
        return None

    def remove_checkpoint(self, filepath: str | Path) -> None:
        self._writer.finish()  # its successor must be complete first
        super().remove_checkpoint(filepath)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, a file or a folder of shards, without running any code from it.
        Raises UserError if it is of another model."""
        path = Path(self.broadcast(checkpoint_path))
        self._writer.finish()
        checkpoint = (
            self._load_folder(path)
            if path.is_dir()
            else super().load_checkpoint(path, weights_only=True)
        )
        rebuild_paths(checkpoint, path.parent)
        return checkpoint

    def _load_folder(self, path: Path) -> dict[str, Any]:
        plain = read_checkpoint(path, mmap=True)
        folder, module = sharded.current(path), self._whole_module
        here: dict[str, Any] = {"state_dict": states.get_model_state_dict(module)}
        if self.optimizers:
            here["optimizer_states"] = [
                states.get_optimizer_state_dict(module, optimizer) for optimizer in self.optimizers
            ]
        _, tensors = sharded.split(here, _tied(module))
        sharded.load(folder, plain, tensors)
        checkpoint = sharded.joined(plain, tensors)
        strict = self.lightning_module is None or self.lightning_module.strict_loading
        # Already filled in place; calls the loading hooks.
        module.load_state_dict(here["state_dict"], strict=strict)
        for optimizer, state in zip(
            self.optimizers, checkpoint.pop("optimizer_states", []), strict=False
        ):
            states.set_optimizer_state_dict(module, optimizer, state)
        checkpoint.pop("state_dict")
        return checkpoint

    def teardown(self) -> None:
        # Another exception is propagating: ours must not replace it.
        fails = sys.exc_info()[0] is not None
        try:
            self._writer.finish()
        except (UserError, RuntimeError) as error:
            if not fails:
                raise
            log.warning("%s", error)
        finally:
            super().teardown()

    @property
    def _whole_module(self) -> nn.Module:
        return cast(nn.Module, self.model)


def _tied(module: nn.Module) -> dict[str, str]:
    """Return, for each weight that has several names (a tied output head), its further names ->
    its first name."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        name = name.replace("_orig_mod.", "")
        known = first.setdefault(id(parameter), name)
        if known != name:
            tied[name] = known
    return tied


def _plain(value: Any) -> Any:
    """Return an 8-bit optimizer state, gathered from its shards, as an ordinary tensor of its
    values; return any other value as it is."""
    # torch 2.13 can neither send tensors of this class to the ranks that resume, nor wait for the
    # tensors inside. torchao quantises them again by each block's largest number. The lowest code
    # is the negative of it here, so that all codes come out the same.
    if not isinstance(value, torch.Tensor) or not hasattr(value, "codes") or _is_plain(value):
        return value
    state: Any = value
    numbers = state.qmap.clone()
    if state.signed:
        numbers[0] = -numbers[-1]
    return (numbers[state.codes.long()].view(len(state.scale), -1) * state.scale[:, None]).view(
        state.shape
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether safetensors can store the tensor; it cannot store subclasses, such as an
    8-bit optimizer's state."""
    local = getattr(tensor, "_local_tensor", tensor)
    return type(local) in (torch.Tensor, nn.Parameter)


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
