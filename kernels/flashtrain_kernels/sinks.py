"""Attention with sinks: each head has one more score in every row of its softmax, whose value is 0.

B batch, Sq queries, H query heads, D head dimension.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from . import dispatch
from .backends import unit_stride
from .eager import Operator, computed, pass_of
from .forms import BATCH, KV_PACKED, QKV_PACKED
from .launch_cache import on_device, signature
from .ops import FORWARD_IN
from .options import Options, Packed, pack

_OPTIONS = len(Packed._fields)

# The outputs of attention without the sink are rescaled; its backward, given them, computes all but
# the sink's own gradient. In eager mode on a GPU each direction adds one small kernel; elsewhere
# torch differentiates `joined`.


def joined(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of attention with a sink, from those of attention
    without it; differentiable.

    Args:
        out, lse: (B, Sq, H, D) and (B, H, Sq).
        sink: (H,).
    """
    # The keys' share of the softmax is exp(lse) / (exp(lse) + exp(sink)).
    sink = sink.to(lse.dtype)[:, None]
    hidden = lse == -torch.inf  # no key: exp(-inf) / exp(sink) = 0, also where the sink is -inf
    above = torch.where(hidden, 0.0, lse - sink)
    share = torch.where(hidden, 0.0, torch.sigmoid(above)).transpose(1, 2)[..., None]
    return (out * share).to(out.dtype), torch.where(hidden, sink, lse - logsigmoid(above))


def attention(tensors: tuple[Tensor, ...], options: Options, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Compute attention with a sink (H,) by the operators, in eager mode only (no
    torch.compile, no functorch)."""
    call, given = pass_of(_WITH_SINK[len(tensors)], (*tensors, sink, *pack(options)))
    return computed(call, given, signature(given))


def join(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) with the sink included, as `joined` but without autograd; may
    overwrite out and lse."""
    if signature((out, lse, sink)) is None or not (out.is_contiguous() and lse.is_contiguous()):
        return joined(out, lse, sink)
    return _joined_in_place(out, lse, sink)


def _joined_in_place(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    if not dispatch.runs_kernels(out.device):
        return joined(out, lse, sink)
    from .backends.portable import sinks  # Triton is imported only where it is used

    with on_device(out.device):
        sinks.join(out, lse, sink)
    return out, lse


def _gradient(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sink: Tensor, kernels: bool
) -> Tensor:
    """Return the gradient (H,) of the sink: the sum over batch and queries of exp(sink - lse) *
    (dLSE - rowsum(dO * O)). out and lse include the sink; kernels: use the Triton kernel where one
    runs."""
    if kernels and dispatch.runs_kernels(out.device):
        from .backends.portable import sinks

        with on_device(out.device):
            return sinks.gradient(
                unit_stride(dout),
                None if dlse is None else dlse.contiguous(),
                out.contiguous(),
                lse.contiguous(),
                sink,
            )
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
    if dlse is not None:
        delta = delta - dlse
    weight = torch.where(lse == -torch.inf, 0.0, torch.exp(sink.to(lse.dtype)[:, None] - lse))
    return -(weight * delta).sum((0, 2)).to(sink.dtype)


def _forward(function: Callable, join_sink: Callable, *inputs: Any) -> tuple[Tensor, Tensor]:
    *tensors, sink = inputs[:-_OPTIONS]
    out, lse = function(*tensors, *inputs[-_OPTIONS:])
    return join_sink(out, lse, sink)


def _backward(function: Callable, kernels: bool, *inputs: Any) -> tuple[Tensor, ...]:
    *tensors, sink, out, lse, wants_bias = inputs[:-_OPTIONS]
    gradients = function(*tensors, out, lse, wants_bias, *inputs[-_OPTIONS:])
    count = len(tensors) - 2
    return (
        *gradients[:count],
        _gradient(tensors[0], tensors[1], out, lse, sink, kernels),
        *gradients[count:],
    )


def _with_sink(plain: Operator) -> Operator:
    """Return the Operator of a forward that takes a sink after the tensors of `plain`. Its backward
    also returns the sink's gradient."""
    # As operators they go by formulas, which modes may watch or change; what they
    # compute has the kernels.
    back = plain.backward
    backward = Operator(
        partial(_backward, back.registered, False), partial(_backward, back.compute, True)
    )
    forward = (
        partial(_forward, plain.registered, joined),
        partial(_forward, plain.compute, _joined_in_place),
    )
    return Operator(*forward, backward)


_WITH_SINK = {
    count: _with_sink(FORWARD_IN[form])
    for count, form in ((3, BATCH), (2, KV_PACKED), (1, QKV_PACKED))
}
