"""The operators of torch.library: forward, backward, their packed forms, fake tensors and autograd.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.

    forward(q, k, v, ...) -> (out, lse)            backward(...) -> (dq, dk, dv, dbias)
    forward_qkvpacked(qkv, ...) -> (out, lse)      backward_qkvpacked(...) -> (dqkv, dbias)
    forward_kvpacked(q, kv, ...) -> (out, lse)     backward_kvpacked(...) -> (dq, dkv, dbias)

The backward is an operator of its own, so that torch.compile sees both; the packed ones write the gradients into
slices of one tensor, so that a fused projection costs no copy. Every output is contiguous, whatever the inputs'
strides are. Selective checkpointing keeps attention's outputs with create_selective_checkpoint_contexts(FORWARDS).
compute.py does the work on real tensors; flops.py counts it.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import compute
from .options import SCHEMA, TENSORS, Options, Packed, pack, unpack

_SAVED = "Tensor out, Tensor lse"


def _define(name: str, schema: str) -> None:
    torch.library.define(f"flashtrain_kernels::{name}", schema, tags=torch.Tag.pt2_compliant_tag)


_define("forward", f"(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor, Tensor)")
_define("forward_qkvpacked", f"(Tensor qkv, {SCHEMA}) -> (Tensor, Tensor)")
_define("forward_kvpacked", f"(Tensor q, Tensor kv, {SCHEMA}) -> (Tensor, Tensor)")
_define(
    "backward",
    f"(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, {_SAVED}, bool bias_gradient, {SCHEMA})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
_define(
    "backward_qkvpacked",
    f"(Tensor dout, Tensor? dlse, Tensor qkv, {_SAVED}, bool bias_gradient, {SCHEMA}) -> (Tensor, Tensor)",
)
_define(
    "backward_kvpacked",
    f"(Tensor dout, Tensor? dlse, Tensor q, Tensor kv, {_SAVED}, bool bias_gradient, {SCHEMA})"
    " -> (Tensor, Tensor, Tensor)",
)

FORWARD = torch.ops.flashtrain_kernels.forward.default
FORWARD_QKVPACKED = torch.ops.flashtrain_kernels.forward_qkvpacked.default
FORWARD_KVPACKED = torch.ops.flashtrain_kernels.forward_kvpacked.default
BACKWARD = torch.ops.flashtrain_kernels.backward.default
BACKWARD_QKVPACKED = torch.ops.flashtrain_kernels.backward_qkvpacked.default
BACKWARD_KVPACKED = torch.ops.flashtrain_kernels.backward_kvpacked.default
FORWARDS = [FORWARD, FORWARD_QKVPACKED, FORWARD_KVPACKED]


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """q (B, Sq, H, D), k and v (B, Sk, K, D) -> out (B, Sq, H, D) and the natural log-sum-exp (B, H, Sq) in float32.

    Differentiable in q, k, v and options.bias. The arguments are taken as checked.
    """
    return _differentiable(FORWARD, q, k, v, *pack(options))


def attention_qkvpacked(qkv: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """`attention` on qkv (B, S, 3, H, D)."""
    return _differentiable(FORWARD_QKVPACKED, qkv, *pack(options))


def attention_kvpacked(q: Tensor, kv: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """`attention` on q (B, Sq, H, D) and kv (B, Sk, 2, K, D)."""
    return _differentiable(FORWARD_KVPACKED, q, kv, *pack(options))


# --- what runs on real tensors ---------------------------------------------------------------------------------------
_DEVICES = ("cpu", "cuda")


@torch.library.impl("flashtrain_kernels::forward", _DEVICES)
def _forward(q, k, v, *packed):
    return compute.forward(q, k, v, unpack(packed))


@torch.library.impl("flashtrain_kernels::forward_qkvpacked", _DEVICES)
def _forward_qkvpacked(qkv, *packed):
    q, k, v = qkv.unbind(2)
    return compute.forward(q, k, v, unpack(packed))


@torch.library.impl("flashtrain_kernels::forward_kvpacked", _DEVICES)
def _forward_kvpacked(q, kv, *packed):
    k, v = kv.unbind(2)
    return compute.forward(q, k, v, unpack(packed))


@torch.library.impl("flashtrain_kernels::backward", _DEVICES)
def _backward(dout, dlse, q, k, v, out, lse, bias_gradient, *packed):
    options = unpack(packed)
    gradients = compute.empty(q), compute.empty(k), compute.empty(v)
    dbias = _empty_bias_gradient(q, options, bias_gradient)
    compute.backward(dout, dlse, q, k, v, out, lse, options, gradients, dbias if bias_gradient else None)
    return (*gradients, dbias)


@torch.library.impl("flashtrain_kernels::backward_qkvpacked", _DEVICES)
def _backward_qkvpacked(dout, dlse, qkv, out, lse, bias_gradient, *packed):
    options = unpack(packed)
    dqkv = compute.empty(qkv)
    dbias = _empty_bias_gradient(qkv, options, bias_gradient)
    q, k, v = qkv.unbind(2)
    compute.backward(dout, dlse, q, k, v, out, lse, options, dqkv.unbind(2), dbias if bias_gradient else None)
    return dqkv, dbias


@torch.library.impl("flashtrain_kernels::backward_kvpacked", _DEVICES)
def _backward_kvpacked(dout, dlse, q, kv, out, lse, bias_gradient, *packed):
    options = unpack(packed)
    dq, dkv = compute.empty(q), compute.empty(kv)
    dbias = _empty_bias_gradient(q, options, bias_gradient)
    (k, v), (dk, dv) = kv.unbind(2), dkv.unbind(2)
    compute.backward(dout, dlse, q, k, v, out, lse, options, (dq, dk, dv), dbias if bias_gradient else None)
    return dq, dkv, dbias


def _empty_bias_gradient(like: Tensor, options: Options, wanted: bool) -> Tensor:
    """An operator cannot return None: without a gradient for the bias, an empty tensor."""
    if not wanted or options.bias is None:
        return like.new_empty((0,))
    return compute.empty(options.bias)


# --- fake tensors: shapes and strides without data -------------------------------------------------------------------


def _fake_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return compute.empty(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse_dtype)


@torch.library.register_fake("flashtrain_kernels::forward")
def _fake_forward(q, k, v, *packed):
    return _fake_outputs(q)


@torch.library.register_fake("flashtrain_kernels::forward_qkvpacked")
def _fake_forward_qkvpacked(qkv, *packed):
    return _fake_outputs(qkv.select(2, 0))


@torch.library.register_fake("flashtrain_kernels::forward_kvpacked")
def _fake_forward_kvpacked(q, kv, *packed):
    return _fake_outputs(q)


@torch.library.register_fake("flashtrain_kernels::backward")
def _fake_backward(dout, dlse, q, k, v, out, lse, bias_gradient, *packed):
    gradient = _empty_bias_gradient(q, unpack(packed), bias_gradient)
    return compute.empty(q), compute.empty(k), compute.empty(v), gradient


@torch.library.register_fake("flashtrain_kernels::backward_qkvpacked")
def _fake_backward_qkvpacked(dout, dlse, qkv, out, lse, bias_gradient, *packed):
    return compute.empty(qkv), _empty_bias_gradient(qkv, unpack(packed), bias_gradient)


@torch.library.register_fake("flashtrain_kernels::backward_kvpacked")
def _fake_backward_kvpacked(dout, dlse, q, kv, out, lse, bias_gradient, *packed):
    return compute.empty(q), compute.empty(kv), _empty_bias_gradient(q, unpack(packed), bias_gradient)


# --- autograd --------------------------------------------------------------------------------------------------------
_BACKWARDS = {FORWARD: BACKWARD, FORWARD_QKVPACKED: BACKWARD_QKVPACKED, FORWARD_KVPACKED: BACKWARD_KVPACKED}


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
        backward = partial(vmap.Transformed.apply, backward)
    *gradients, dbias = backward(dout, dlse, *tensors, out, lse, wants_bias, bias, *others, *ctx.numbers)
    return (*gradients, dbias if wants_bias else None, *rest)


def _register_autograd(forward: Any, backward: Any) -> None:
    def autograd_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
        return _gradients(ctx, backward, ctx.needs_input_grad[ctx.inputs], dout, dlse)

    torch.library.register_autograd(forward.name(), autograd_backward, setup_context=_save)


for _forward_op, _backward_op in _BACKWARDS.items():
    _register_autograd(_forward_op, _backward_op)


class _Eager(torch.autograd.Function):
    """The same autograd, for eager mode alone: the registered one reads the operator's schema anew at every call,
    which takes longer than all else (0.1 of 0.15 ms on one CPU core)."""

    @staticmethod
    def forward(ctx: Any, operator: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = operator(*inputs)
        _save(ctx, inputs, output)
        ctx.backward_operator = _BACKWARDS[operator]
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
        wants_bias = ctx.needs_input_grad[1 + ctx.inputs]
        return (None, *_gradients(ctx, ctx.backward_operator, wants_bias, dout, dlse))


def _differentiable(operator: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
    # Compilers and transforms (vmap, torch.func.grad) go by what is registered.
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or not torch.is_grad_enabled():
        return operator(*inputs)
    return _Eager.apply(operator, *inputs)


from . import flops, vmap  # noqa: E402, F401 - registers the formulas, and the rules of functorch's transforms
