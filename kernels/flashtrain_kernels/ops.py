"""The operators of torch.library: forward, backward, their packed forms, and fake tensors.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.

    forward(q, k, v, ...) -> (out, lse)            backward(...) -> (dq, dk, dv, dbias)
    forward_qkvpacked(qkv, ...) -> (out, lse)      backward_qkvpacked(...) -> (dqkv, dbias)
    forward_kvpacked(q, kv, ...) -> (out, lse)     backward_kvpacked(...) -> (dq, dkv, dbias)

The backward is an operator of its own, so that torch.compile sees both; the packed ones write the gradients into
slices of one tensor, so that a fused projection costs no copy. Every output is contiguous, whatever the inputs'
strides are. Selective checkpointing keeps attention's outputs with create_selective_checkpoint_contexts(FORWARDS).
compute.py does the work on real tensors, autograd.py makes the operators differentiable, flops.py counts what they do.
"""

import torch
from torch import Tensor

from . import compute
from .options import SCHEMA, Options, unpack

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
BACKWARDS = {FORWARD: BACKWARD, FORWARD_QKVPACKED: BACKWARD_QKVPACKED, FORWARD_KVPACKED: BACKWARD_KVPACKED}

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
