"""Sharding a model with FSDP2."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from flashtrain.errors import UserError
from flashtrain.models.mixer import DECAYS
from flashtrain.models.trainable import inner

DATA_PARALLEL = "data_parallel"  # the mesh dimension's name, which is Lightning's
# Attribute of a transformers model: the names of its layers' classes.
LAYER_NAMES = "_no_split_modules"


def shard(
    module: nn.Module,
    device_mesh: Any,
    precision: str = "32-true",
    *,
    blocks: Iterable[nn.Module] | None = None,
    group_bytes: int = 0,
) -> nn.Module:
    """Shard a model over the data-parallel devices, in place, and return it.

    Call it in a LightningModule's configure_model, after activation checkpointing
    and before torch.compile.

    Args:
        module: the model. Weights are gathered for calls of forward and of the methods that its
            attribute `forward_methods` names; without the attribute, of `loss`.
        device_mesh: Lightning's (`self.device_mesh` under ModelParallelStrategy), whose dimension
            data_parallel is used.
        precision: Lightning's name, such as "bf16-mixed". Mixed precisions gather weights and
            compute in bf16 or fp16, and reduce gradients in float32. Mixers with decays (DECAYS)
            are gathered in float32, each by itself.
        blocks: the submodules that are gathered, used and freed in turn; None: `module.blocks`, or
            a transformers model's layers. The rest (embeddings, final norm) is gathered as one.
        group_bytes: consecutive blocks are gathered together in groups of at least so many bytes,
            and a model that is smaller than this as a whole; 0: each block by itself.

    Raises:
        UserError: no blocks are given or found.
    """
    # Imported here: not every build of torch has it.
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    if blocks is None:
        blocks = known_blocks(module)
    computed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    policy = MixedPrecisionPolicy(
        param_dtype=computed, reduce_dtype=None if computed is None else torch.float32
    )
    for part in module.modules() if computed is not None else ():
        # FSDP2 has one dtype a module: gather it whole.
        if DECAYS & dict(part.named_parameters(recurse=False)).keys():
            fully_shard(
                part, mesh=device_mesh[DATA_PARALLEL], mp_policy=replace(policy, param_dtype=None)
            )
    parts: list[Any] = [*groups_of(module, blocks, computed, group_bytes), module]
    for part in parts:
        fully_shard(part, mesh=device_mesh[DATA_PARALLEL], mp_policy=policy)
    for name in getattr(module, "forward_methods", ("loss",)):
        if hasattr(module, name):
            register_fsdp_forward_method(module, name)
    return module


def groups_of(
    module: nn.Module, blocks: Iterable[nn.Module], computed: torch.dtype | None, group_bytes: int
) -> list[list[nn.Module]]:
    """Return consecutive blocks in groups that have at least `group_bytes` once gathered in the
    dtype `computed` (None: as stored); [] if the whole module has less."""

    def gathered(part: nn.Module) -> int:
        return sum(x.numel() * (computed or x.dtype).itemsize for x in part.parameters())

    groups: list[list[nn.Module]] = []
    left = 0
    for block in blocks if gathered(module) >= group_bytes else ():
        if left <= 0:
            groups.append([])
            left = group_bytes
        groups[-1].append(block)
        left -= gathered(block)
    return groups


def known_blocks(module: nn.Module) -> list[nn.Module]:
    """Return a model's blocks; UserError where it has none."""
    blocks = blocks_of(module)
    if not blocks:
        raise UserError(
            f"{type(inner(module)).__name__} has no attribute 'blocks', the list of its layers, "
            "whose weights are gathered one by one. Set it in the model, or use "
            "trainer.strategy=ddp (in Python: shard(..., blocks=...))."
        )
    return blocks


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return a model's `blocks`, or the layers of the transformers models in
    it; [] if it has neither."""
    blocks = getattr(inner(module), "blocks", None)
    if blocks is not None:
        return list(blocks)
    names = {name for part in module.modules() for name in getattr(part, LAYER_NAMES, None) or ()}
    return [part for part in module.modules() if type(part).__name__ in names]
