"""Attention with sinks: one more score in each row of a head, whose value is nothing. Of attention without it the
outputs are rescaled; its backward, given these and their log-sum-exp, is that of the keys' share, and what is left is
the sink's own gradient.

In eager mode on a GPU each way is one small kernel, which changes the outputs where they lie. Under compilers and
transforms, and where no kernels run, `joined` is a formula that torch differentiates.

B batch, Sq queries, H query heads, D head dimension.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from . import dispatch
from .eager import COMPUTES, Pass, pass_of, without_derivative
from .launch_cache import on_device, signature
from .ops import BACKWARDS, FORWARD_OF, unit_stride
from .options import Options, Packed, pack


def joined(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with one more score in each row, `sink` (H,), whose value is nothing: from that without it.

    out: (B, Sq, H, D); lse: (B, H, Sq). The keys' share of the softmax is exp(lse) / (exp(lse) + exp(sink)), which
    autograd differentiates; the kernels' backward takes the log-sum-exp's gradient.
    """
    sink = sink.to(lse.dtype)[:, None]
    hidden = lse == -torch.inf  # no key: exp(-inf) / exp(sink) = 0, also where the sink is -inf
    above = torch.where(hidden, 0.0, lse - sink)
    share = torch.where(hidden, 0.0, torch.sigmoid(above)).transpose(1, 2)[..., None]
    return (out * share).to(out.dtype), torch.where(hidden, sink, lse - logsigmoid(above))


def attention(tensors: tuple[Tensor, ...], options: Options, sink: Tensor) -> tuple[Tensor, Tensor]:
    """`ops.attention` with a sink (H,), outside of compilers and transforms."""
    inputs = (sink, *tensors, *pack(options))
    operator = FORWARD_OF[len(tensors)]
    call, given = pass_of(("with a sink", operator), inputs, _with_sink(operator))
    signed = signature(given)
    if torch.is_grad_enabled():
        return (_Attention.apply if signed is None else _apply_plain)(call, operator, signed, *given)
    return _results(call, given, signed)


def join(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """`joined` without a gradient, where out and lse lie if kernels run there."""
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


def _gradient(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sink: Tensor, kernels: bool) -> Tensor:
    """The sink's, given out and lse with it: of its weights exp(sink - lse) times dLSE - rowsum(dO * O)."""
    if kernels and dispatch.runs_kernels(out.device):
        from .backends.portable import sinks

        with on_device(out.device):
            return sinks.gradient(
                unit_stride(dout), None if dlse is None else dlse.contiguous(), out.contiguous(), lse.contiguous(), sink
            )
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
    if dlse is not None:
        delta = delta - dlse
    weight = torch.where(lse == -torch.inf, 0.0, torch.exp(sink.to(lse.dtype)[:, None] - lse))
    return -(weight * delta).sum((0, 2)).to(sink.dtype)


@cache
def _with_sink(operator: Any) -> Callable:
    """What computes the forward operator's (out, lse) with a sink before its arguments."""

    def forward(sink: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
        out, lse = COMPUTES[operator](*inputs)
        return _joined_in_place(out, lse, sink)

    return forward


@cache
def _with_sinks_gradient(operator: Any) -> Callable:
    """What computes the backward operator's results, and the sink's gradient, with the sink before its arguments."""

    def backward(sink: Tensor, dout: Tensor, dlse: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
        out, lse = inputs[-len(Packed._fields) - 3 : -len(Packed._fields) - 1]
        return (*COMPUTES[operator](dout, dlse, *inputs), _gradient(dout, dlse, out, lse, sink, True))

    return backward


def _results(call: Pass, tensors: Sequence[Tensor], signed: tuple[Any, ...] | None) -> Any:
    """A pass's results: by the operator itself, and by formulas, where somebody may watch or change them."""
    if signed is not None:
        return call(tensors, signed)
    sink, *inputs = call.filled(tensors)
    _, operator = call.operator
    results = operator(*inputs)
    if operator in BACKWARDS:
        out, lse = results
        return joined(out, lse, sink)
    dout, dlse, *_ = inputs
    out, lse = inputs[-len(Packed._fields) - 3 : -len(Packed._fields) - 1]
    return (*results, _gradient(dout, dlse, out, lse, sink, False))


class _Attention(torch.autograd.Function):
    """Autograd of `attention`. What it saves is the same however it computes."""

    @staticmethod
    def forward(ctx: Any, call: Pass, operator: Any, signed: Any, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        output = _results(call, tensors, signed)
        ctx.save_for_backward(*tensors, *output)
        ctx.call, ctx.operator = call, operator
        # An output nobody used has the gradient None instead of a tensor of zeros to fill and read.
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
        saved = ctx.saved_tensors  # read once: activation checkpointing allows no second time
        *tensors, out, lse = saved
        if dout is None and dlse is None:
            return (None,) * (3 + len(tensors))
        dout = torch.zeros_like(out) if dout is None else dout
        arguments = ctx.call.filled(tensors)
        count = len(arguments) - len(Packed._fields)
        sink, inputs, packed = arguments[0], arguments[1:count], Packed(*arguments[count:])
        wants_bias = packed.bias is not None and ctx.needs_input_grad[3 + count]
        backward = BACKWARDS[ctx.operator]
        given = (sink, dout, dlse, *inputs, out, lse, wants_bias, *packed)
        call, given_tensors = pass_of(("with a sink", backward), given, _with_sinks_gradient(backward))
        with torch.no_grad():
            *gradients, dbias, dsink = _results(call, given_tensors, signature(given_tensors))
        made = [dsink, *gradients, *([dbias] if wants_bias else [])]
        if torch.is_grad_enabled():
            made = list(without_derivative(made, given_tensors))
        if packed.bias is not None and not wants_bias:
            made.append(None)
        return (None, None, None, *made, *(None,) * (len(tensors) - len(made)))


# Function.apply looks for transforms first, which a signature says there are none of.
_apply_plain = super(torch.autograd.Function, _Attention).apply
