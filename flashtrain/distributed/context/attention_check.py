"""Rejecting a model whose attention sees only its own device's part of the sequence.

A model that computes attention by itself (transformers', nn.MultiheadAttention, scaled_dot_product_attention) would see
only its own device's tokens, and nothing else in a training shows that its loss is wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashtrain.distributed.context.attention import CONTEXT_ATTENTION
from flashtrain.distributed.context.sequence import ContextSequence
from flashtrain.errors import UserError

# The dimension, from the end, of the keys in an operator's tensor of this name. flash-attn's layout, and ours:
# (B, S, H, D) or (T, H, D), packed tensors with one dimension more.
KEYS = {"key": -3, "k": -3, "kv": -4, "qkv": -4}
# torch's own: (B, H, S, D), or (B, S, E).
TORCH_ATTENTION = ("aten::_scaled_dot_product", "aten::_native_multi_head_attention")
SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")


class AttentionCheck(TorchDispatchMode):
    """A context manager around a step that rejects attention to only one device's part of a sharded sequence.

    It rejects attention operators (torch's, flashtrain's, flash-attn's, flex attention, and softmax over a matrix of
    tokens by tokens) that have as many keys as this device holds tokens. It does not see what torch.compile fused.
    Every torch call costs some microseconds more on the host.

    Args:
        sequence: the step's sharded sequence; None if the batch was not sharded.
        step: the kind of step, in words ("training"), for messages.
    """

    supports_higher_order_operators = True

    def __init__(self, sequence: ContextSequence | None, step: str) -> None:
        super().__init__()
        self.sequence = sequence
        self.step = step
        self.shared = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else compiled code would run uncompiled in this step, in more memory

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is CONTEXT_ATTENTION:
            self.shared += 1
        elif self.sequence is not None and torch._C._current_graph_task_id() == -1:
            # Not in a backward: shared attention's computes with each device's keys, outside its operator.
            self._look_at(self.sequence, func, args)
        return func(*args, **(kwargs or {}))

    def require_shared(self, degree: int) -> None:
        """Raise UserError if the step had no attention across the `degree` devices that share a sequence."""
        if self.shared == 0:
            raise UserError(
                f"a {self.step} step in which no attention is shared by the {degree} devices that hold parts of each "
                "sequence: every token would see only its own device's part. Use a model made of "
                "flashtrain.Attention, or another strategy (fsdp, ddp) for a model with its own attention, or if "
                "tokens need not see each other ContextParallelStrategy(check_attention=False)."
            )

    def _look_at(self, sequence: ContextSequence, func: Any, args: tuple) -> None:
        schema = getattr(func, "_schema", None)
        if schema is None:  # a higher-order operator
            if "flex_attention" in str(func) and len(args) > 1 and isinstance(args[1], Tensor):
                sequence.refuse_own_part(args[1].shape[-2], "flex_attention")
            return
        if schema.name in SOFTMAX:
            shape = args[0].shape
            if len(shape) > 2 and args[1] in (-1, len(shape) - 1) and sequence.is_own_part(shape[-2]):
                sequence.refuse_own_part(shape[-1], "softmax")
            return
        for argument, given in zip(schema.arguments, args, strict=False):
            if argument.name in KEYS and isinstance(given, Tensor):
                place = -2 if schema.name.startswith(TORCH_ATTENTION) else KEYS[argument.name]
                if given.is_floating_point() and given.dim() >= -place:
                    sequence.refuse_own_part(given.shape[place], schema.name.partition("::")[2].strip("_"))
                return
