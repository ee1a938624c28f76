"""Rejecting a model whose tokens see only their own device's part of the sequence.

A model that computes attention by itself (transformers', nn.MultiheadAttention, scaled_dot_product_attention), or mixes
tokens by a recurrence or a convolution, would see only its own device's tokens, and nothing else in a training shows
that its loss is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import copy, deepcopy
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashtrain.distributed.context.attention import CONTEXT_ATTENTION
from flashtrain.distributed.context.batch import TOKENS
from flashtrain.distributed.context.sequence import ContextSequence
from flashtrain.errors import UserError, first_line
from flashtrain.models.token_probe import first_moved

# The dimension, from the end, of the keys in an operator's tensor of this name. flash-attn's layout, and ours:
# (B, S, H, D) or (T, H, D), packed tensors with one dimension more.
KEYS = {"key": -3, "k": -3, "kv": -4, "qkv": -4}
# torch's own: (B, H, S, D), or (B, S, E).
TORCH_ATTENTION = ("aten::_scaled_dot_product", "aten::_native_multi_head_attention")
SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")
PROBED = 13  # tokens of a rank, the first and last of which change: a prime, which no number of heads is
DECLARE = (
    "Use another strategy (fsdp, ddp), or if that is intended (batch norm, experts of limited capacity) declare "
    "shares_sequences = True in the class of the model, or of your own LightningModule."
)


class AttentionCheck(TorchDispatchMode):
    """A context manager around a step that rejects attention to only one device's part of a sharded sequence.

    It rejects attention operators (torch's, flashtrain's, flash-attn's, flex attention, and softmax over a matrix of
    tokens by tokens) that have as many keys as this device holds tokens. It does not see what torch.compile fused.
    Every torch call costs some microseconds more on the host.

    Args:
        sequence: the step's sharded sequence; None if the batch was not sharded.
        step: the kind of step, in words ("training"), for messages.
        mixing: what else mixes the model's tokens (other_mixing).
    """

    supports_higher_order_operators = True

    def __init__(self, sequence: ContextSequence | None, step: str, mixing: str | None = None) -> None:
        super().__init__()
        self.mixing = mixing
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
        """Raise UserError if the step mixed tokens by anything but attention across the `degree` devices."""
        if self.shared == 0:
            raise UserError(
                f"a {self.step} step in which no attention is shared by the {degree} devices that hold parts of each "
                "sequence: every token would see only its own device's part. Use a model made of "
                "flashtrain.Attention, or another strategy (fsdp, ddp) for a model with its own attention, or if "
                "tokens need not see each other ContextParallelStrategy(check_attention=False)."
            )
        if self.mixing is not None:
            raise UserError(
                f"a {self.step} step in which tokens see each other by more than shared attention ({self.mixing}): "
                f"there every token would see only its own device's part of the sequence. {DECLARE}"
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


class StepEnded(Exception):
    """Ends a probed step at the backward that it calls itself."""


def other_mixing(
    module: pl.LightningModule, step: str, precision: Callable[[], Any], sequence: ContextSequence, *given: Any
) -> str | None:
    """Return what mixes tokens other than shared attention, in words, equal on every rank; None if nothing does.

    Every rank must call this. It runs the module's method `step` in evaluation mode on a few tokens of the batch; lists
    and metrics of the module, what it has logged, and random states stay as they are.
    """
    tokens = min(PROBED, sequence.length)
    modes = [(one, one.training) for one in module.modules()]

    def run(changed: bool) -> None:
        with isolate_rng(), precision(), suppress(StepEnded):
            getattr(_twin(module), step)(_few_tokens(given[0], sequence, tokens, changed), *given[1:])

    module.eval()
    try:
        found = first_moved(run, tokens, slice(1, -1))
    except Exception as error:
        if isinstance(error, UserError):
            raise
        what = f"{type(module).__name__}.{step} fails on {tokens} tokens ({first_line(error)})"
        raise UserError(f"{what}, with which a step is probed for what mixes tokens. {DECLARE}") from error
    finally:
        module.train(modes[0][1])
        for one, mode in modes:
            one.training = mode
    of_ranks: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, found)
    return next(filter(None, of_ranks), None)


def _twin(module: pl.LightningModule) -> Any:
    """The module, except that it logs nothing, and that its lists and whatever has no weights are copies."""
    twin: Any = object.__new__(type(module))
    vars(twin).update({name: copy(x) if type(x) in (dict, list, set) else x for name, x in vars(module).items()})
    for name, child in module.named_children():
        twin._modules[name] = child if any(True for _ in child.parameters()) else deepcopy(child)
    twin.log = lambda *_, **__: None
    return twin


def _few_tokens(batch: dict[str, Any], sequence: ContextSequence, tokens: int, changed: bool) -> dict[str, Any]:
    few = dict(batch)
    for name, x in batch.items():
        if name in ("cu_seq_lens_q", "cu_seq_lens_k"):  # transformers' bounds of packed documents
            few[name] = x.new_tensor([0, tokens])
        elif isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] in (sequence.held, sequence.length):
            few[name] = part = x[:1, torch.arange(tokens) % sequence.held]
            if changed and name in TOKENS:
                part[:, [0, -1]] = torch.where(part > 0, part - 1, part + 1)[:, [0, -1]]
    return few
