"""The operators under compilers and functorch's transforms: autograd as torch.library
registers it, and torch.vmap.

Per-sample gradients (vmap of grad), grad of vmap, jacrev and nesting work, for q, k, v, the packed
tensors and the bias. Second derivatives (hessian), forward mode (jvp, jacfwd) and
torch.func.functionalize raise.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .masks.operators import a_call_for_each_sample
from .ops import BACKWARDS, FORWARDS
from .options import TENSORS, Packed

# torch.library's register_vmap and register_autograd do not go together (torch 2.11 to 2.13):
# an operator that has the second refuses torch.func.grad, because the autograd.Function made of
# it lacks setup_context. So the operators are given an autograd.Function that has it, under the
# dispatch key that functorch's transforms put in front of all others; without a transform
# nothing comes by here.
_library = torch.library.Library("flashtrain_kernels", "IMPL")


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    """Save for the backward q, k, v (or the packed tensors), out, lse and the options' tensors and
    numbers."""
    places = len(inputs) - len(Packed._fields)
    packed = inputs[places:]
    ctx.save_for_backward(*inputs[:places], *output, *packed[:TENSORS])
    ctx.inputs = places
    ctx.numbers = packed[TENSORS:]
    # An output nobody used has the gradient None instead of a tensor of zeros to fill and read.
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, backward: Any, wants_bias: bool, dout: Tensor | None, dlse: Tensor | None
) -> tuple:
    """Return the gradients of all arguments of a forward operator, None for those without one. ctx:
    from _save; backward: the backward operator."""
    saved = ctx.saved_tensors  # read once: activation checkpointing allows no second time
    tensors, (out, lse, bias, *others) = saved[: ctx.inputs], saved[ctx.inputs :]
    rest = (None,) * (len(Packed._fields) - 1)  # the options but for the bias
    if dout is None and dlse is None:
        return (*(None,) * ctx.inputs, None, *rest)
    dout = torch.zeros_like(out) if dout is None else dout
    wants_bias = bias is not None and wants_bias
    # create_graph=True: what has no derivative must raise, not be left out.
    if torch.is_grad_enabled():
        backward = partial(Transformed.apply, backward)
    *gradients, dbias = backward(
        dout, dlse, *tensors, out, lse, wants_bias, bias, *others, *ctx.numbers
    )
    return (*gradients, dbias if wants_bias else None, *rest)


class Transformed(torch.autograd.Function):
    """An attention operator's derivative and vmap rule under functorch's
    transforms (grad, vmap, jacrev)."""

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
            raise NotImplementedError(
                "attention has no second derivative: for one, use torch's "
                "scaled_dot_product_attention with SDPBackend.MATH"
            )
        wants_bias = ctx.needs_input_grad[1 + ctx.inputs]
        return (None, *_gradients(ctx, BACKWARDS[ctx.operator], wants_bias, *gradients))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, operator: Any, *inputs: Any) -> tuple:
        return a_call_for_each_sample(
            partial(Transformed.apply, operator), info.batch_size, in_dims[1:], inputs
        )


def _register(forward: Any, backward: Any) -> None:
    def autograd_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
        return _gradients(ctx, backward, ctx.needs_input_grad[ctx.inputs], dout, dlse)

    torch.library.register_autograd(forward.name(), autograd_backward, setup_context=_save)
    for operator in (forward, backward):
        _library.impl(
            operator.name(), partial(Transformed.apply, operator), "FuncTorchDynamicLayerFrontMode"
        )


for _forward_op, _backward_op in BACKWARDS.items():
    _register(_forward_op, _backward_op)
