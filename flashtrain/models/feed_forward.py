"""The feed-forward of a block, which may compute a chunk of the tokens at a time.

Shapes: T tokens, E embedding width, F width inside the feed-forward; U is F, or 2F for a gated
activation (gate, then value).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flashtrain.models.layer_spec import GATED
from flashtrain_kernels import gelu_feed_forward
from flashtrain_kernels.environment import autocast_dtype
from flashtrain_kernels.loss_head import add_product

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": partial(F.gelu, approximate="tanh"),  # Hendrycks and Gimpel 2016; GPT-2's "gelu_new"
    "gelu_exact": F.gelu,  # by the error function, the "gelu" of transformers' BERT
    "swiglu": F.silu,  # Shazeer 2020, "GLU Variants Improve Transformer"
    "geglu": F.gelu,  # Shazeer 2020, with the exact GELU as in ModernBERT
}

_DEVICES = ("cpu", "cuda")
_WEIGHTS = (
    "Tensor up, Tensor? up_bias, Tensor down, Tensor? down_bias, str activation, SymInt chunk"
)


class FeedForward(nn.Module):
    """A feed-forward: down(activation(up(x))), or down(activation(gate(x)) * value(x))
    for a gated activation.

    Args:
        embed: Width E of the input and the output.
        ffn: Width F inside.
        activation: A name in ACTIVATIONS.
        bias: Whether both layers have biases.
    """

    def __init__(self, embed: int, ffn: int, activation: str = "gelu", bias: bool = True) -> None:
        super().__init__()
        self.activation = activation
        self.gated = activation in GATED
        # gated: the gate's rows, the value's.
        self.up = nn.Linear(embed, 2 * ffn if self.gated else ffn, bias=bias)
        self.down = nn.Linear(ffn, embed, bias=bias)
        self.chunk: int | None = None  # the number of tokens computed at a time; None: all

    def forward(self, x: Tensor) -> Tensor:
        """Compute the feed-forward of x (..., E), a tensor (..., E)."""
        up, down = self.up, self.down
        plain = are_plain(up, down)  # else without chunks, which the memory estimate knows
        if plain and self.chunk is not None and x.shape[:-1].numel() > self.chunk:
            return chunked_feed_forward(
                x,
                up.weight,
                up.bias,
                down.weight,
                down.bias,
                activation=self.activation,
                chunk=self.chunk,
            )
        if plain and self.activation == "gelu" and up.bias is not None and down.bias is not None:
            return gelu_feed_forward(x, up.weight, up.bias, down.weight, down.bias)
        activate = ACTIVATIONS[self.activation]
        if not self.gated:
            return down(activate(up(x)))
        gate, value = up(x).chunk(2, dim=-1)
        return down(activate(gate) * value)


def are_plain(*layers: object) -> bool:
    """Return whether these are nn.Linear itself: adapters, quantized and float8
    layers compute differently."""
    return all(type(one) is nn.Linear for one in layers)


def chunked_feed_forward(
    x: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    *,
    activation: str,
    chunk: int,
) -> Tensor:
    """Compute a feed-forward chunk by chunk, so that the hidden activations (T, F)
    are never stored whole.

    The result equals the whole computation up to rounding and is differentiable once. The backward
    recomputes the up projection of each chunk, and sums the weights' gradients in float32 (float64
    for float64). Under autocast both compute in autocast's dtype.

    Args:
        x: The input, (..., E).
        up: The weights of the up projection, (U, E), with a bias (U,) or None; U is F, or 2F
            for a gated activation.
        down: The weights of the down projection, (E, F), with a bias (E,) or None.
        activation: A name in ACTIVATIONS.
        chunk: The number of tokens in a chunk.

    Returns:
        The output, (..., E).
    """
    tensors: tuple[Tensor | None, ...] = (x.reshape(-1, x.shape[-1]), up, up_bias, down, down_bias)
    dtype = autocast_dtype(x.device.type)
    if dtype is not None and x.dtype != torch.float64:  # autocast leaves float64 alone
        tensors = tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)
    return FEED_FORWARD(*tensors, activation, chunk).view(*x.shape[:-1], -1)


# Forward and backward are operators, so that torch.compile neither unrolls the chunks (at a million
# tokens, dozens in every layer) nor merges the backward's recomputation with the forward, which
# would store it after all.
def _define(name: str, schema: str) -> Any:
    torch.library.define(f"flashtrain::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    return getattr(torch.ops.flashtrain, name).default


FEED_FORWARD = _define("feed_forward", f"(Tensor x, {_WEIGHTS}) -> Tensor")
BACKWARD = _define(
    "feed_forward_backward", f"(Tensor dy, Tensor x, {_WEIGHTS}) -> ({', '.join(['Tensor'] * 5)})"
)


@torch.library.impl("flashtrain::feed_forward", _DEVICES)
def _forward(x, up, up_bias, down, down_bias, activation, chunk):
    out = x.new_empty(x.shape[0], down.shape[0])
    for part, target in zip(x.split(chunk), out.split(chunk), strict=True):
        inner, _ = _inner(part, up, up_bias, activation)
        target.copy_(F.linear(inner, down, down_bias))
    return out


def _backward(dy, x, up, up_bias, down, down_bias, activation, chunk):
    dx = x.new_empty(x.shape)
    total = torch.promote_types(x.dtype, torch.float32)
    dup, ddown = torch.zeros_like(up, dtype=total), torch.zeros_like(down, dtype=total)
    dup_bias, ddown_bias = dup.new_zeros(up.shape[0]), dup.new_zeros(down.shape[0])
    for dy_part, x_part, dx_part in zip(
        dy.split(chunk), x.split(chunk), dx.split(chunk), strict=True
    ):
        inner, outer = _inner(x_part, up, up_bias, activation)
        add_product(ddown, dy_part.mT, inner)
        del inner  # freed before the next product, so that the two are never in memory together
        douter = _outer_gradient(dy_part, down, outer, activation)
        del outer
        add_product(dup, douter.mT, x_part)
        dx_part.copy_(douter @ up)
        if up_bias is not None:
            dup_bias += douter.sum(0, dtype=total)
        if down_bias is not None:
            ddown_bias += dy_part.sum(0, dtype=total)
        del douter
    gradients = (dup, _or_empty(dup_bias, up_bias), ddown, _or_empty(ddown_bias, down_bias))
    return (dx, *(gradient.to(x.dtype) for gradient in gradients))


torch.library.impl("flashtrain::feed_forward_backward", _DEVICES, _backward)


def _or_empty(gradient: Tensor, bias: Tensor | None) -> Tensor:
    """The gradient, or an empty tensor where there is no bias, since an
    operator cannot return None."""
    return gradient if bias is not None else gradient.new_empty(0)


def _inner(x: Tensor, up: Tensor, up_bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    """Return (activation(outer), (T, F); outer = up(x), (T, U)) of x (T, E)."""
    if activation == "gelu":
        bias = up.new_zeros(up.shape[0]) if up_bias is None else up_bias
        inner, outer = torch.ops.flashtrain_kernels.linear_gelu(x, up, bias)
        return inner, outer
    outer, activate = F.linear(x, up, up_bias), ACTIVATIONS[activation]
    if activation not in GATED:
        return activate(outer), outer
    gate, value = outer.chunk(2, dim=-1)
    return activate(gate).mul_(value), outer


def _outer_gradient(dy: Tensor, down: Tensor, outer: Tensor, activation: str) -> Tensor:
    """Return the gradient (T, U) of outer = up(x) (T, U) from dy, that of the output (T, E); with
    a gated activation it overwrites outer."""
    if activation == "gelu":
        return torch.ops.flashtrain_kernels.product_times_gelu_gradient(dy, down, outer)
    dinner = dy @ down
    backward = (
        torch.ops.aten.silu_backward if activation == "swiglu" else torch.ops.aten.gelu_backward
    )
    if activation not in GATED:
        return backward(dinner, outer)
    gate, value = outer.chunk(2, dim=-1)
    dvalue = ACTIVATIONS[activation](gate).mul_(dinner)
    dinner.mul_(value)
    value.copy_(dvalue)
    backward(dinner, gate, grad_input=gate)
    return outer


@torch.library.register_fake("flashtrain::feed_forward")
def _fake_forward(x, up, up_bias, down, down_bias, activation, chunk):
    return x.new_empty(x.shape[0], down.shape[0])


@torch.library.register_fake("flashtrain::feed_forward_backward")
def _fake_backward(dy, x, up, up_bias, down, down_bias, activation, chunk):
    given = (x, up, up_bias, down, down_bias)
    return tuple(x.new_empty(0 if one is None else one.shape) for one in given)


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.activation, ctx.chunk = inputs[5:]


@once_differentiable
def _gradients(ctx: Any, dy: Tensor) -> tuple:
    given = ctx.saved_tensors  # x, up, up_bias, down, down_bias
    pairs = zip(given, BACKWARD(dy, *given, ctx.activation, ctx.chunk), strict=True)
    return (*(None if one is None else gradient for one, gradient in pairs), None, None)


torch.library.register_autograd("flashtrain::feed_forward", _gradients, setup_context=_save)
