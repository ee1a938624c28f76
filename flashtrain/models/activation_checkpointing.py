"""Activation checkpointing of a block, and the options by which a step trades time for memory.

Shapes: B batch, S sequence, E embedding width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor
from torch._functorch import config as functorch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from flashtrain.errors import at_least, one_of
from flashtrain.settings import options
from flashtrain_kernels import FORWARDS

CHECKPOINTING = get_args(options.ActivationCheckpointing)[:-1]  # without auto
# Of one tensor: the allocator of pinned memory rounds its size up to a power of two.
PINNED_BYTES = 2**28

_OURS = set(FORWARDS)  # attention operators whose outputs selective checkpointing stores
_TORCHS = "aten._scaled_dot_product"  # how the names of torch's begin


@dataclass(frozen=True)
class MemorySavings:
    """Options that reduce the memory of activations at the cost of time, without
    changing results or weights.

    Args:
        checkpointing: Which activations of a block are stored; the backward recomputes the others
            (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"). "none": all are
            stored but those of norms and activation functions in compiled code (compile_lean);
            "selective": the block's input, and attention's output and log-sum-exp, so that
            attention is not recomputed (Korthikanti et al. 2022, "Reducing Activation Recomputation
            in Large Transformer Models"); "full": the block's input alone.
        offload: Whether blocks' inputs are stored in pinned host memory, with
            "selective" or "full".
        ffn_chunk: The number of tokens that the feed-forward computes at once, forward
            and backward (None: all).
        loss_chunk: The number of tokens whose logits are stored at once (None: chosen by the loss).
        layers: The number of layers, the first ones, that `checkpointing` applies to; the others
            store all (None: it applies to every layer). The backward comes to the first ones last,
            when it has freed what the others stored.

    Raises:
        UserError: A name is unknown, or a number is below 1.
    """

    checkpointing: str = "none"
    offload: bool = False
    ffn_chunk: int | None = None
    loss_chunk: int | None = None
    layers: int | None = None

    def __post_init__(self) -> None:
        one_of("checkpointing", self.checkpointing, CHECKPOINTING)
        at_least("ffn_chunk", self.ffn_chunk, 1)
        at_least("loss_chunk", self.loss_chunk, 1)
        at_least("layers", self.layers, 1)

    def of_layer(self, number: int) -> MemorySavings:
        """Return the options of one layer, counted from 0."""
        first = self.layers is None or number < self.layers
        return replace(self, checkpointing=self.checkpointing if first else "none", layers=None)

    def describe(self) -> str:
        """Describe the options, such as "full checkpointing, feed-forward by 16,384
        tokens"; "" where all are off."""
        where = f" in {self.layers} of the layers" if self.layers else ""
        parts = [f"{self.checkpointing} checkpointing{where}"] * (self.checkpointing != "none")
        parts += ["inputs in host memory"] if self.offload else []
        parts += [f"feed-forward by {self.ffn_chunk:,} tokens"] if self.ffn_chunk else []
        parts += [f"loss by {self.loss_chunk:,} tokens"] if self.loss_chunk else []
        return ", ".join(parts)


def compile_lean(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function by torch.compile with these options, so that it saves less for its
    backward: what only norms and activation functions change is computed again.

    torch saves a norm's output and SwiGLU's product, since a matrix product of the backward reads
    them. Computed again they are written by kernels that the backward runs anyway, those of the
    norm's and the activation's gradient. A Llama's layers save 27 to 32% less by it, and gradients
    stay as they are (on a CPU, bit for bit).
    """
    compiled = torch.compile(function, **options)

    def lean(*arguments: Any, **named: Any) -> Any:
        # Of these calls alone, the first of which compiles: other programs' code stays as it is.
        with functorch.patch(ban_recompute_materialized_backward=False):
            return compiled(*arguments, **named)

    return lean


def checkpointed(
    function: Callable[..., Tensor],
    x: Tensor,
    *,
    savings: MemorySavings,
    dropout: float = 0.0,
    **arguments: Any,
) -> Tensor:
    """Compute function(x, **arguments) and store only x for the backward, with "selective"
    also attention's output.

    Selective checkpointing stores the outputs of our attention and of torch's SDPA, but nothing of
    standard attention, whose S x S matrices would be stored. With savings.offload x is copied to
    the host and back in every step, and the computation waits for it.

    Args:
        function: The block's computation, which may be compiled.
        x: The block's input, (B, S, E).
        savings: The memory options, with checkpointing "selective" or "full".
        dropout: The dropout probability inside `function`; above 0, recomputation drops
            the same weights again.
        arguments: Further keyword arguments of `function`.

    Returns:
        The function's result, (B, S, E).
    """
    again = partial(function, **arguments)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": dropout > 0}
    if savings.checkpointing == "selective":
        # torch's attention draws its dropout from the generator inside of the operator:
        # recomputation without it would shift all random numbers after it. Ours draws a seed
        # outside.
        policy = partial(_policy, dropout == 0)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    if not savings.offload:
        return checkpoint(again, x, **options)
    # These hooks must stay outside of torch.compile.
    with torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host):
        return checkpoint(again, x, **options)


def _to_host(x: Tensor) -> tuple[torch.device, torch.Size, list[Tensor]]:
    """Return (x's device, x's shape, a copy of x in host memory, in parts). No synchronization is
    needed: what reads the copy is queued on the device after it."""
    parts = x.flatten().split(PINNED_BYTES // x.element_size())
    pinned = [torch.empty(one.shape, dtype=x.dtype, pin_memory=x.is_cuda) for one in parts]
    return (
        x.device,
        x.shape,
        [place.copy_(one, non_blocking=True) for place, one in zip(pinned, parts, strict=True)],
    )


def _from_host(saved: tuple[torch.device, torch.Size, list[Tensor]]) -> Tensor:
    device, shape, parts = saved
    x = torch.empty(shape, dtype=parts[0].dtype, device=device)
    for place, part in zip(x.view(-1).split(PINNED_BYTES // x.element_size()), parts, strict=True):
        place.copy_(part, non_blocking=True)
    return x


def save_output_of(operator: Any) -> None:
    """Make selective checkpointing store an operator's outputs too. The operator must
    not draw random numbers."""
    _OURS.add(operator)


def _policy(
    saves_torchs: bool, context: Any, operator: Any, *arguments: Any, **options: Any
) -> CheckpointPolicy:
    saved = operator in _OURS or (saves_torchs and str(operator).startswith(_TORCHS))
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.MUST_RECOMPUTE
