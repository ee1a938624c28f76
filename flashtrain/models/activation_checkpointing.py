"""Activation checkpointing of one block: keep little in the forward, compute the rest again in the backward.

torch.utils.checkpoint does the work, eagerly and inside torch.compile (where the graph is cut accordingly). Shapes:
B batch, S sequence, E embedding width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flashtrain.models.memory_savings import MemorySavings
from flashtrain_kernels import FORWARDS

# What torch's scaled_dot_product_attention may call; a build of torch need not have all of them.
_SDPA = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
_OURS = set(FORWARDS)
_SDPA_OPERATORS = {getattr(torch.ops.aten, name).default for name in _SDPA if hasattr(torch.ops.aten, name)}


def checkpointed(
    function: Callable[..., Tensor], x: Tensor, *, savings: MemorySavings, dropout: float = 0.0, **arguments: Any
) -> Tensor:
    """function(x, **arguments), of which only x (and attention's output, if selective) is kept for the backward.

    x and the result (B, S, E). savings.checkpointing: "selective" or "full"; selective keeps the outputs of our
    attention and of torch's SDPA, and nothing of standard attention, whose S x S matrices it would have to keep.
    dropout: the probability in force inside; the same weights are dropped again. With savings.offload x waits in pinned
    host memory: two copies over the bus for each block and step, in line with the computing (not beside it), so the
    hooks must not be inside torch.compile; function may be compiled.
    """
    again = partial(function, **arguments)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": dropout > 0}
    if savings.checkpointing == "selective":
        options["context_fn"] = _keep_ours if dropout > 0 else _keep_attention
    if not savings.offload:
        return checkpoint(again, x, **options)
    with torch.autograd.graph.save_on_cpu(pin_memory=x.is_cuda):
        return checkpoint(again, x, **options)


def keep_output_of(operator: Any) -> None:
    """From now on selective checkpointing keeps this operator's outputs too: another attention of ours, that draws no
    random numbers inside."""
    _OURS.add(operator)


def _keep_attention() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _keep_ours() -> Any:
    """torch's attention draws its dropout from the generator itself: left out of the recomputation, it would move all
    random numbers after it. Ours draws a seed outside of the operator."""
    return create_selective_checkpoint_contexts(_policy_ours)


def _policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    kept = operator in _OURS or operator in _SDPA_OPERATORS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE


def _policy_ours(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _OURS else CheckpointPolicy.MUST_RECOMPUTE
