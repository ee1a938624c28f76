"""Savings of activation memory that change neither the result nor the weights.

Shapes: B batch, S sequence, T tokens, E embedding width, F inner width; U is F, or 2F for SwiGLU and GeGLU (gate, then
value).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flashtrain.errors import at_least, one_of
from flashtrain.settings import options
from flashtrain_kernels import FORWARDS
from flashtrain_kernels.environment import autocast_dtype
from flashtrain_kernels.loss_head import add_product

CHECKPOINTING = get_args(options.Checkpointing)[:-1]  # without auto
HOST_PIECE = 2**28  # bytes: the allocator of pinned memory rounds each piece up to a power of two

# The operators that torch's scaled_dot_product_attention may call; a build of torch need not have all of them.
_SDPA = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
_OURS = set(FORWARDS)
_SDPA_OPERATORS = {getattr(torch.ops.aten, name).default for name in _SDPA if hasattr(torch.ops.aten, name)}

_DEVICES = ("cpu", "cuda")
_WEIGHTS = "Tensor up, Tensor? up_bias, Tensor down, Tensor? down_bias, str activation, SymInt chunk"


@dataclass(frozen=True)
class MemorySavings:
    """Memory saved at the cost of time in a training step.

    Args:
        checkpointing: Which activations of a block are stored for its backward, which recomputes the others (Chen et
            al. 2016, "Training Deep Nets with Sublinear Memory Cost"): "none" stores all, "selective" the block's
            input and attention's output and log-sum-exp, so that attention is not recomputed (Korthikanti et al.
            2022, "Reducing Activation Recomputation in Large Transformer Models"), "full" the input alone.
        offload: Whether blocks' inputs are stored in pinned host memory, with "selective" or "full".
        ffn_chunk: Tokens that the feed-forward computes at once, forward and backward (None: all).
        loss_chunk: Tokens whose logits are stored at once (None: the loss's own choice).

    Raises:
        UserError: An unknown name, or a number below 1.
    """

    checkpointing: str = "none"
    offload: bool = False
    ffn_chunk: int | None = None
    loss_chunk: int | None = None

    def __post_init__(self) -> None:
        one_of("checkpointing", self.checkpointing, CHECKPOINTING)
        at_least("ffn_chunk", self.ffn_chunk, 1)
        at_least("loss_chunk", self.loss_chunk, 1)

    def describe(self) -> str:
        """For example "full checkpointing, inputs in host memory, feed-forward by 16,384 tokens"; "" for none."""
        parts = [f"{self.checkpointing} checkpointing"] if self.checkpointing != "none" else []
        parts += ["inputs in host memory"] if self.offload else []
        parts += [f"feed-forward by {self.ffn_chunk:,} tokens"] if self.ffn_chunk else []
        parts += [f"loss by {self.loss_chunk:,} tokens"] if self.loss_chunk else []
        return ", ".join(parts)


def checkpointed(
    function: Callable[..., Tensor], x: Tensor, *, savings: MemorySavings, dropout: float = 0.0, **arguments: Any
) -> Tensor:
    """function(x, **arguments), for whose backward only x (and attention's output, if selective) is stored.

    x and the result are (B, S, E); function may be compiled. Selective checkpointing stores the outputs of our
    attention and of torch's SDPA, but nothing of standard attention, whose S x S matrices would be stored. With
    savings.offload each block and step copies x over the bus twice, in line with the computation.

    Args:
        savings: With checkpointing "selective" or "full".
        dropout: The probability inside `function`; recomputation drops the same weights again.
    """
    again = partial(function, **arguments)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": dropout > 0}
    if savings.checkpointing == "selective":
        options["context_fn"] = _save_ours if dropout > 0 else _save_attention
    if not savings.offload:
        return checkpoint(again, x, **options)
    # These hooks must stay outside of torch.compile.
    with torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host):
        return checkpoint(again, x, **options)


def _to_host(x: Tensor) -> tuple[torch.device, torch.Size, list[Tensor]]:
    """x in host memory. No synchronization is needed: whatever reads the copy is queued on the device after it."""
    pieces = x.flatten().split(HOST_PIECE // x.element_size())
    pinned = [torch.empty(one.shape, dtype=x.dtype, pin_memory=x.is_cuda) for one in pieces]
    return x.device, x.shape, [place.copy_(one, non_blocking=True) for place, one in zip(pinned, pieces, strict=True)]


def _from_host(saved: tuple[torch.device, torch.Size, list[Tensor]]) -> Tensor:
    device, shape, pieces = saved
    x = torch.empty(shape, dtype=pieces[0].dtype, device=device)
    for part, piece in zip(x.view(-1).split(HOST_PIECE // x.element_size()), pieces, strict=True):
        part.copy_(piece, non_blocking=True)
    return x


def keep_output_of(operator: Any) -> None:
    """Let selective checkpointing store this operator's outputs too. It must draw no random numbers inside."""
    _OURS.add(operator)


def _save_attention() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _save_ours() -> Any:
    # torch's attention draws its dropout from the generator inside of the operator: recomputation without it would
    # shift all random numbers after it. Ours draws a seed outside.
    return create_selective_checkpoint_contexts(_policy_ours)


def _policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    saved = operator in _OURS or operator in _SDPA_OPERATORS
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.MUST_RECOMPUTE


def _policy_ours(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _OURS else CheckpointPolicy.MUST_RECOMPUTE


# Forward and backward are operators, so that torch.compile neither unrolls the pieces (at a million tokens, dozens in
# every layer) nor merges the backward's recomputation with the forward, which would store it after all.
def _define(name: str, schema: str) -> None:
    torch.library.define(f"flashtrain::{name}", schema, tags=torch.Tag.pt2_compliant_tag)


_define("feed_forward", f"(Tensor x, {_WEIGHTS}) -> Tensor")
_define("feed_forward_backward", f"(Tensor dy, Tensor x, {_WEIGHTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")

FEED_FORWARD = torch.ops.flashtrain.feed_forward.default
BACKWARD = torch.ops.flashtrain.feed_forward_backward.default


def feed_forward_pieces(x: Tensor, up: nn.Linear, down: nn.Linear, activation: str, chunk: int) -> Tensor:
    """down(activation(up(x))) for x (..., E), `chunk` tokens at a time, so that F is never stored for all tokens.

    Equal to the whole up to rounding and differentiable once. The backward recomputes each piece's up projection. The
    weights' gradients are summed in float32 (float64 for float64). Under autocast it computes in autocast's dtype.
    activation: A name in block.FEED_FORWARDS.
    """
    tensors: tuple[Tensor | None, ...] = (x.reshape(-1, x.shape[-1]), up.weight, up.bias, down.weight, down.bias)
    dtype = autocast_dtype(x.device.type)
    if dtype is not None and x.dtype != torch.float64:  # autocast leaves float64 alone
        tensors = tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)
    return FEED_FORWARD(*tensors, activation, chunk).view(*x.shape[:-1], -1)


@torch.library.impl("flashtrain::feed_forward", _DEVICES)
def _forward(x, up, up_bias, down, down_bias, activation, chunk):
    out = x.new_empty(x.shape[0], down.shape[0])
    for piece, target in zip(x.split(chunk), out.split(chunk), strict=True):
        inner, _ = _inner(piece, up, up_bias, activation)
        target.copy_(F.linear(inner, down, down_bias))
    return out


def _backward(dy, x, up, up_bias, down, down_bias, activation, chunk):
    dx = x.new_empty(x.shape)
    total = torch.promote_types(x.dtype, torch.float32)
    dup, ddown = torch.zeros_like(up, dtype=total), torch.zeros_like(down, dtype=total)
    dup_bias, ddown_bias = dup.new_zeros(up.shape[0]), dup.new_zeros(down.shape[0])
    for dy_piece, piece, dx_piece in zip(dy.split(chunk), x.split(chunk), dx.split(chunk), strict=True):
        inner, outer = _inner(piece, up, up_bias, activation)
        add_product(ddown, dy_piece.mT, inner)
        del inner  # freed before the next product, so that the two are never in memory together
        douter = _outer_gradient(dy_piece, down, outer, activation)
        del outer
        add_product(dup, douter.mT, piece)
        dx_piece.copy_(douter @ up)
        if up_bias is not None:
            dup_bias += douter.sum(0, dtype=total)
        if down_bias is not None:
            ddown_bias += dy_piece.sum(0, dtype=total)
        del douter
    gradients = (dup, _or_empty(dup_bias, up_bias), ddown, _or_empty(ddown_bias, down_bias))
    return (dx, *(gradient.to(x.dtype) for gradient in gradients))


torch.library.impl("flashtrain::feed_forward_backward", _DEVICES, _backward)


def _or_empty(gradient: Tensor, bias: Tensor | None) -> Tensor:
    """The gradient, or an empty tensor where there is no bias, since an operator cannot return None."""
    return gradient if bias is not None else gradient.new_empty(0)


def _inner(x: Tensor, up: Tensor, up_bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    """(T, E) -> activation(outer) (T, F) and outer = up(x) (T, U)."""
    if activation == "gelu":
        bias = up.new_zeros(up.shape[0]) if up_bias is None else up_bias
        inner, outer = torch.ops.flashtrain_kernels.linear_gelu(x, up, bias)
        return inner, outer
    outer = F.linear(x, up, up_bias)
    if activation == "gelu_exact":
        return F.gelu(outer), outer
    gate, value = outer.chunk(2, dim=-1)
    return (F.silu if activation == "swiglu" else F.gelu)(gate).mul_(value), outer


def _outer_gradient(dy: Tensor, down: Tensor, outer: Tensor, activation: str) -> Tensor:
    """(T, E), (T, U) -> (T, U); a gated activation's gradient overwrites outer."""
    if activation == "gelu":
        return torch.ops.flashtrain_kernels.product_times_gelu_gradient(dy, down, outer)
    dinner = dy @ down
    aten = torch.ops.aten
    if activation == "gelu_exact":
        return aten.gelu_backward(dinner, outer)
    gate, value = outer.chunk(2, dim=-1)
    dvalue = (F.gelu if activation == "geglu" else F.silu)(gate).mul_(dinner)
    dinner.mul_(value)
    value.copy_(dvalue)
    backward = aten.gelu_backward if activation == "geglu" else aten.silu_backward
    backward(dinner, gate, grad_input=gate)
    return outer


@torch.library.register_fake("flashtrain::feed_forward")
def _fake_forward(x, up, up_bias, down, down_bias, activation, chunk):
    return x.new_empty(x.shape[0], down.shape[0])


@torch.library.register_fake("flashtrain::feed_forward_backward")
def _fake_backward(dy, x, up, up_bias, down, down_bias, activation, chunk):
    biases = (x.new_empty(0 if bias is None else bias.shape) for bias in (up_bias, down_bias))
    dup_bias, ddown_bias = biases
    return x.new_empty(x.shape), up.new_empty(up.shape), dup_bias, down.new_empty(down.shape), ddown_bias


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.activation, ctx.chunk = inputs[5:]


@once_differentiable
def _gradients(ctx: Any, dy: Tensor) -> tuple:
    x, up, up_bias, down, down_bias = ctx.saved_tensors
    dx, dup, dup_bias, ddown, ddown_bias = BACKWARD(dy, x, up, up_bias, down, down_bias, ctx.activation, ctx.chunk)
    given = (dx, dup, None if up_bias is None else dup_bias, ddown, None if down_bias is None else ddown_bias)
    return (*given, None, None)


torch.library.register_autograd("flashtrain::feed_forward", _gradients, setup_context=_save)
