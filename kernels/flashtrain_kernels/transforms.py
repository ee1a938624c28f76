"""Autograd of the operators: registered for torch.compile, quicker in eager mode, and under functorch's transforms; and
torch.vmap of them.

torch.library's register_vmap and register_autograd do not go together (torch 2.11 to 2.13): an operator that has the
second refuses torch.func.grad, because the autograd.Function made of it lacks setup_context. So the operators are
given an autograd.Function that has it, under the dispatch key that functorch's transforms put in front of all others;
without a transform nothing comes by here.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension; n samples of vmap; Bm is B or 1, the
rows of a mask.

The vmapped dimension joins the batch, so n samples are one call. Per-sample gradients (vmap of grad), grad of vmap,
jacrev and nesting work, for q, k, v, the packed tensors and the bias. What the samples share (mask, bias, slopes that
vmap does not map) is not copied where strides allow. Within vmap a bias's gradient is per sample, as every tensor's is:
it takes n times the bias, also where the samples share that.

One call a sample, one after the other as a loop would run them: dropout, whose random numbers go by the sequence's
number, which joining would change; slopes that vmap maps beside a Mask, by whose sequences they go; a BlockMask that
vmap maps, or of more than one row; packed sequences of which no Mask is made.

Limits: no second derivative (hessian), no forward mode (jvp, jacfwd), no torch.func.functionalize: each raises.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .masks.mask import PLAN
from .ops import BACKWARDS, FORWARDS
from .options import TENSORS, Packed

_MASK_ROWS = {"mask_queries": 1, "mask_keys": 0, "forward_table": 0, "dq_table": 0, "dkdv_table": 0}  # where Bm is
_Dims: Any = Packed  # the vmapped dimension of each option, None where it is not mapped


def vmapped(call: Callable, is_backward: bool, samples: int, in_dims: Sequence[Any], inputs: tuple) -> tuple:
    """(outputs, the place of the vmapped dimension in each). in_dims: that of the inputs, None: not mapped.

    call: the operator, under the transforms that remain; is_backward: whether it is a backward one.
    What comes before the options are tensors whose first dimension is B, a missing dlse, and, last of a backward's,
    whether the bias's gradient is wanted.
    """
    count = len(inputs) - len(Packed._fields)
    options, dims = Packed(*inputs[count:]), _Dims(*in_dims[count:])
    if _goes_one_by_one(options, dims):
        return _one_by_one(call, samples, in_dims, inputs)
    batch = inputs[0].shape[1 if in_dims[0] == 0 else 0]
    tensors = [
        _joined(x, dim, samples, batch) if isinstance(x, Tensor) else x
        for x, dim in zip(inputs[:count], in_dims, strict=False)
    ]
    bias_gradient = is_backward and inputs[count - 1]
    joined = options._replace(
        bias=_joined_bias(options.bias, dims.bias, samples, batch, bias_gradient),
        alibi_slopes=_joined_slopes(options, dims.alibi_slopes, samples, batch),
        seed=None,
        **_joined_mask(options, dims, samples, batch),
    )
    *outputs, last = call(*tensors, *joined)
    outputs = [x.unflatten(0, (samples, batch)) for x in outputs]
    if is_backward and not bias_gradient:
        return (*outputs, last), (*(0,) * len(outputs), None)  # the empty tensor that stands for no gradient
    last = last.unflatten(0, (samples, batch))
    if bias_gradient and batch != 1 and options.bias is not None and _size(options.bias, dims.bias, 0) == 1:
        last = last.sum(1, keepdim=True)
    return (*outputs, last), (0,) * (len(outputs) + 1)


def _joined(x: Tensor, dim: int | None, samples: int, batch: int, at: int = 0) -> Tensor:
    """x with n * B, sample by sample, where it has B or 1: at `at`. dim: its vmapped dimension; None: it has none."""
    x = x.unsqueeze(at) if dim is None else x.movedim(dim, at)
    return x.expand(*x.shape[:at], samples, batch, *x.shape[at + 2 :]).flatten(at, at + 1)


def _size(x: Tensor, dim: int | None, at: int) -> int:
    """The size of dimension `at` of one sample's tensor."""
    return x.shape[at if dim is None or dim > at else at + 1]


def _joined_bias(bias: Tensor | None, dim: int | None, samples: int, batch: int, gradient: bool) -> Tensor | None:
    if bias is None or (dim is None and bias.shape[0] == 1 and not gradient):
        return bias
    return _joined(bias, dim, samples, batch)


def _joined_slopes(options: Packed, dim: int | None, samples: int, batch: int) -> Tensor | None:
    """(H,), or (n * B, H), or, with a Mask, a row for each of the sequences that it numbers."""
    slopes = options.alibi_slopes
    if slopes is None or (dim is None and (slopes.dim() == 1 or options.mask_queries is not None)):
        return slopes
    if dim is not None:
        slopes, dim = slopes.movedim(dim, 0), 0
        slopes = slopes[:, None] if slopes.dim() == 2 else slopes
    return _joined(slopes, dim, samples, batch)


def _joined_mask(options: Packed, dims: Any, samples: int, batch: int) -> dict[str, Any]:
    """The tensors of a mask to replace: none where all samples and rows share one, or one BlockMask."""
    given = {name: (getattr(options, name), getattr(dims, name), at) for name, at in _MASK_ROWS.items()}
    given = {name: part for name, part in given.items() if part[0] is not None}
    if all(dim is None and x.shape[at] == 1 for x, dim, at in given.values()):
        return {}
    return {name: _joined(x, dim, samples, batch, at) for name, (x, dim, at) in given.items()}


def _goes_one_by_one(options: Packed, dims: Any) -> bool:
    if options.dropout_p > 0 or options.cu_seqlens_q is not None:
        return True
    if options.mask_queries is not None:
        return dims.alibi_slopes is not None
    rows = options.forward_table  # of a BlockMask
    return rows is not None and (any(dim is not None for dim in dims[3:TENSORS]) or rows.shape[0] > 1)


def _one_by_one(call: Callable, samples: int, in_dims: Sequence[Any], inputs: tuple) -> tuple:
    """A call for each sample."""
    called = []
    for sample in range(samples):
        # The dimensions of a list of numbers are a list.
        own = [x.select(dim, sample) if isinstance(dim, int) else x for x, dim in zip(inputs, in_dims, strict=True)]
        called.append(call(*own))
    outputs = tuple(torch.stack(list(each)) for each in zip(*called, strict=True))
    return outputs, (0,) * len(outputs)


@torch.library.register_vmap(PLAN)
def _plan(info: Any, in_dims: tuple, queries: Tensor, keys: Tensor | None, seqlen_k: int, blocks: list[int]) -> tuple:
    """Plans of n masks: the tables of one mask of n * Bm rows."""
    samples, rows = info.batch_size, _size(queries, in_dims[0], 1)
    if keys is not None:
        rows = max(rows, _size(keys, in_dims[1], 0))
        keys = _joined(keys, in_dims[1], samples, rows)
    tables = PLAN(_joined(queries, in_dims[0], samples, rows, at=1), keys, seqlen_k, blocks)
    return tuple(table.unflatten(0, (samples, rows)) for table in tables), (0, 0, 0)


_library = torch.library.Library("flashtrain_kernels", "IMPL")


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
