"""Autograd of the operators: registered for torch.compile, quicker in eager mode, and under functorch's transforms.

torch.library's register_vmap and register_autograd do not go together (torch 2.11 to 2.13): an operator that has the
second refuses torch.func.grad, because the autograd.Function made of it lacks setup_context. So the operators are
given an autograd.Function that has it, under the dispatch key that functorch's transforms put in front of all others;
without a transform nothing comes by here. vmap.py has the rules of torch.vmap.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .ops import BACKWARDS, FORWARD_OF, FORWARDS
from .options import TENSORS, Options, Packed, pack
from .vmap import vmapped

_library = torch.library.Library("flashtrain_kernels", "IMPL")


def attention(tensors: tuple[Tensor, ...], options: Options) -> tuple[Tensor, Tensor]:
    """(q, k, v), (q, kv) or (qkv,) -> out (B, Sq, H, D) and the natural log-sum-exp (B, H, Sq) in float32.

    q (B, Sq, H, D), k and v (B, Sk, K, D), kv (B, Sk, 2, K, D), qkv (B, S, 3, H, D). Differentiable in these and in
    options.bias. The arguments are taken as checked.
    """
    inputs = (*tensors, *pack(options))
    # Compilers and transforms (vmap, torch.func.grad) go by what is registered.
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or not torch.is_grad_enabled():
        return FORWARD_OF[len(tensors)](*inputs)
    return _Eager.apply(FORWARD_OF[len(tensors)], *inputs)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    """What the backward needs: q, k, v or the packed ones, the outputs, and the options' tensors and numbers."""
    places = len(inputs) - len(Packed._fields)
    packed = inputs[places:]
    ctx.save_for_backward(*inputs[:places], *output, *packed[:TENSORS])
    ctx.inputs = places
    ctx.numbers = packed[TENSORS:]
    # An output nobody used has the gradient None instead of a tensor of zeros to fill and read.
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, backward: Any, wants_bias: bool, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    """The gradients of all of an operator's arguments."""
    saved = ctx.saved_tensors  # read once: activation checkpointing allows no second time
    tensors, (out, lse, bias, *others) = saved[: ctx.inputs], saved[ctx.inputs :]
    rest = (None,) * (len(Packed._fields) - 1)  # the options but for the bias
    if dout is None and dlse is None:
        return (*(None,) * ctx.inputs, None, *rest)
    dout = torch.zeros_like(out) if dout is None else dout
    wants_bias = bias is not None and wants_bias
    if torch.is_grad_enabled():  # create_graph=True: what has no derivative must raise, not be left out
        backward = partial(Transformed.apply, backward)
    *gradients, dbias = backward(dout, dlse, *tensors, out, lse, wants_bias, bias, *others, *ctx.numbers)
    return (*gradients, dbias if wants_bias else None, *rest)


def _register_autograd(forward: Any, backward: Any) -> None:
    def autograd_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
        return _gradients(ctx, backward, ctx.needs_input_grad[ctx.inputs], dout, dlse)

    torch.library.register_autograd(forward.name(), autograd_backward, setup_context=_save)


for _forward_op, _backward_op in BACKWARDS.items():
    _register_autograd(_forward_op, _backward_op)


class _Eager(torch.autograd.Function):
    """The same autograd, for eager mode alone: the registered one reads the operator's schema anew at every call,
    which takes longer than all else (0.1 of 0.15 ms on one CPU core)."""

    @staticmethod
    def forward(ctx: Any, operator: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = operator(*inputs)
        _save(ctx, inputs, output)
        ctx.backward_operator = BACKWARDS[operator]
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
        wants_bias = ctx.needs_input_grad[1 + ctx.inputs]
        return (None, *_gradients(ctx, ctx.backward_operator, wants_bias, dout, dlse))


class Transformed(torch.autograd.Function):
    """An operator under functorch's transforms: what is registered for autograd, and vmap."""

    @staticmethod
    def forward(operator: Any, *inputs: Any) -> Any:
        return operator(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        operator, *arguments = inputs
        ctx.operator = operator
        if operator in FORWARDS:
            _save(ctx, tuple(arguments), output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        if ctx.operator not in FORWARDS:
            raise NotImplementedError("attention has no second derivative: its backward cannot be differentiated")
        wants_bias = ctx.needs_input_grad[1 + ctx.inputs]
        return (None, *_gradients(ctx, BACKWARDS[ctx.operator], wants_bias, *gradients))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, operator: Any, *inputs: Any) -> tuple:
        call = partial(Transformed.apply, operator)
        return vmapped(call, operator not in FORWARDS, info.batch_size, in_dims[1:], inputs)


def _register_transforms(operator: Any) -> None:
    def transformed(*inputs: Any) -> Any:
        return Transformed.apply(operator, *inputs)

    _library.impl(operator.name(), transformed, "FuncTorchDynamicLayerFrontMode")


for _operators in BACKWARDS.items():
    for _operator in _operators:
        _register_transforms(_operator)
