"""The feed-forward over pieces of the tokens, so that its inner width F is never stored for all of them.

Forward and backward are operators of torch.library: torch.compile takes each as one step instead of unrolling the
pieces (at a million tokens there are dozens in every layer), and cannot merge what the backward computes again with the
forward, which would store it after all. The backward computes the up projection of each piece again, one matrix
product more where there were six.

Shapes: T tokens, E embedding width, F inner width; U is F, or 2F for SwiGLU and GeGLU (gate, then value).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flashtrain_kernels.loss_head import add_product

_WEIGHTS = "Tensor up, Tensor? up_bias, Tensor down, Tensor? down_bias, str activation, SymInt chunk"


def _define(name: str, schema: str) -> None:
    torch.library.define(f"flashtrain::{name}", schema, tags=torch.Tag.pt2_compliant_tag)


_define("feed_forward", f"(Tensor x, {_WEIGHTS}) -> Tensor")
_define("feed_forward_backward", f"(Tensor dy, Tensor x, {_WEIGHTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")

FEED_FORWARD = torch.ops.flashtrain.feed_forward.default
BACKWARD = torch.ops.flashtrain.feed_forward_backward.default


def feed_forward_pieces(x: Tensor, up: nn.Linear, down: nn.Linear, activation: str, chunk: int) -> Tensor:
    """down(activation(up(x))) for x (..., E), `chunk` tokens at a time; activation: a name of FEED_FORWARDS.

    Equal to the whole to rounding; the weights' gradients are added up over the pieces in float32 (float64 for
    float64). Under autocast it computes in autocast's dtype, as nn.Linear does. Differentiable once.
    """
    tensors: tuple[Tensor | None, ...] = (x.reshape(-1, x.shape[-1]), up.weight, up.bias, down.weight, down.bias)
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:  # autocast leaves float64 alone
        dtype = torch.get_autocast_dtype(device)
        tensors = tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)
    return FEED_FORWARD(*tensors, activation, chunk).view(*x.shape[:-1], -1)


_DEVICES = ("cpu", "cuda")


@torch.library.impl("flashtrain::feed_forward", _DEVICES)
def _forward(x, up, up_bias, down, down_bias, activation, chunk):
    out = x.new_empty(x.shape[0], down.shape[0])
    for piece, target in zip(x.split(chunk), out.split(chunk), strict=True):
        inner, _ = _inner(piece, up, up_bias, activation)
        target.copy_(F.linear(inner, down, down_bias))
    return out


@torch.library.impl("flashtrain::feed_forward_backward", _DEVICES)
def _backward(dy, x, up, up_bias, down, down_bias, activation, chunk):
    dx = x.new_empty(x.shape)
    total = torch.promote_types(x.dtype, torch.float32)
    dup, ddown = torch.zeros_like(up, dtype=total), torch.zeros_like(down, dtype=total)
    dup_bias, ddown_bias = dup.new_zeros(up.shape[0]), dup.new_zeros(down.shape[0])
    for dy_piece, piece, dx_piece in zip(dy.split(chunk), x.split(chunk), dx.split(chunk), strict=True):
        inner, outer = _inner(piece, up, up_bias, activation)
        add_product(ddown, dy_piece.mT, inner)
        douter = _outer_gradient(dy_piece, down, outer, activation)
        add_product(dup, douter.mT, piece)
        dx_piece.copy_(douter @ up)
        if up_bias is not None:
            dup_bias += douter.sum(0, dtype=total)
        if down_bias is not None:
            ddown_bias += dy_piece.sum(0, dtype=total)
    gradients = (dup, _or_empty(dup_bias, up_bias), ddown, _or_empty(ddown_bias, down_bias))
    return (dx, *(gradient.to(x.dtype) for gradient in gradients))


def _or_empty(gradient: Tensor, bias: Tensor | None) -> Tensor:
    """An operator cannot return None: without a bias, an empty tensor."""
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
    """(T, E), (T, U) -> (T, U)."""
    if activation == "gelu":
        return torch.ops.flashtrain_kernels.product_times_gelu_gradient(dy, down, outer)
    dinner = dy @ down
    aten = torch.ops.aten
    if activation == "gelu_exact":
        return aten.gelu_backward(dinner, outer)
    gate, value = outer.chunk(2, dim=-1)
    if activation == "geglu":
        return torch.cat((aten.gelu_backward(dinner * value, gate), dinner * F.gelu(gate)), dim=-1)
    return torch.cat((aten.silu_backward(dinner * value, gate), dinner * F.silu(gate)), dim=-1)


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
