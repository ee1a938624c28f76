"""Fully sharding a model with FSDP2, and gathering it again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from flashtrain.errors import UserError

DATA_PARALLEL = "data_parallel"  # the mesh dimension's name, which is Lightning's
FORWARD_METHODS = ("loss", "score")  # what training calls beside forward; they need the gathered weights
LAYER_NAMES = "_no_split_modules"  # where a transformers model has the names of its layers' classes


def shard(
    module: nn.Module,
    device_mesh: Any,
    precision: str = "32-true",
    *,
    blocks: Iterable[nn.Module] | None = None,
) -> nn.Module:
    """Shard `module` over the data-parallel devices, in place, and return it; for a LightningModule's configure_model.

    blocks: the submodules (transformer blocks) that are each gathered, used and freed on their own; None takes
    `module.blocks`, or a transformers model's layers. What is left (embeddings, final norm) is gathered as one.
    device_mesh: Lightning's (`self.device_mesh` under ModelParallelStrategy), of which the dimension data_parallel is
    used; one without named dimensions is used whole.
    precision: Lightning's name; the mixed ones gather weights and compute in bf16 or fp16 and reduce gradients in
    float32. Apply activation checkpointing before, torch.compile after this.
    Raises UserError for a module that has no `blocks` where none are given.
    """
    # Imported when used: not every build of torch has it.
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    if blocks is None:
        blocks = blocks_of(module)
        if not blocks:
            raise UserError(f"{type(module).__name__} has no 'blocks': say which of its modules are sharded one by one")
    names = getattr(device_mesh, "mesh_dim_names", None)
    mesh = device_mesh[DATA_PARALLEL] if names and DATA_PARALLEL in names else device_mesh
    policy = _policy(precision)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    for name in FORWARD_METHODS:
        if hasattr(module, name):
            register_fsdp_forward_method(module, name)
    return module


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """A model's `blocks`, or the layers of the transformers models in it; [] where it has neither."""
    blocks = getattr(module, "blocks", None)
    if blocks is not None:
        return list(blocks)
    names = {name for part in module.modules() for name in getattr(part, LAYER_NAMES, None) or ()}
    return [part for part in module.modules() if type(part).__name__ in names]


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's whole weights on the CPU, for export; names as in the unsharded, uncompiled module.

    Under FSDP2 every rank must call it: the shards are gathered, and rank 0 gets the weights, the others an empty
    dictionary.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(module, options=options)
    return {name.replace("_orig_mod.", ""): value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _policy(precision: str) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    computed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    if computed is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=torch.float32)
