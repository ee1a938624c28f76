"""The operators of torch.library: forward, backward, their packed forms and fake tensors.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.

    forward(q, k, v, ...) -> (out, lse)            backward(...) -> (dq, dk, dv, dbias)
    forward_qkvpacked(qkv, ...) -> (out, lse)      backward_qkvpacked(...) -> (dqkv, dbias)
    forward_kvpacked(q, kv, ...) -> (out, lse)     backward_kvpacked(...) -> (dq, dkv, dbias)

Every output is contiguous, whatever the inputs' strides are.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import dispatch
from .eager import Operator, compute_backward, compute_forward, empty, pass_of
from .forms import (
    BATCH,
    HEADS_FIRST,
    KV_PACKED,
    QKV_PACKED,
    ROW,
    ROW_KV_PACKED,
    ROW_QKV_PACKED,
    Form,
    apart,
)
from .launch_cache import applies, signature
from .masks import rows
from .masks.operators import SCHEMAS
from .masks.plan import build_plan_reference
from .options import SCHEMA, Packed, unpack

_DEVICES = ("cpu", "cuda")


def _run(operator: Operator, inputs: tuple) -> Any:
    if applies(inputs[0].device):
        call, tensors = pass_of(operator, inputs)
        signed = signature(tensors)
        if signed is not None:
            return call(tensors, signed)
    return operator.compute(*inputs)


def _register(suffix: str, form: Form) -> Operator:
    """Define and register with torch.library the operators forward and backward, names ended by
    `suffix`, on tensors in this form; return the forward's Operator."""
    names = form.layouts
    of_forward = f"flashtrain_kernels::forward{suffix}"
    of_backward = f"flashtrain_kernels::backward{suffix}"
    given, count = ", ".join(f"Tensor {name}" for name in names), len(names)
    gradients = ", ".join(["Tensor"] * (count + 1))
    saved = "Tensor out, Tensor lse, bool bias_gradient"
    tags = torch.Tag.pt2_compliant_tag
    torch.library.define(of_forward, f"({given}, {SCHEMA}) -> (Tensor, Tensor)", tags=tags)
    schema = f"(Tensor dout, Tensor? dlse, {given}, {saved}, {SCHEMA}) -> ({gradients})"
    torch.library.define(of_backward, schema, tags=tags)

    def operator_backward(*inputs: Any) -> tuple[Tensor, ...]:
        results = _run(of_gradients, inputs)  # an operator cannot return None
        return results if len(results) > count else (*results, _no_bias_gradient(results[0]))

    def fake_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        q, _, v = apart(inputs[:count])
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        return out, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse_dtype)

    def fake_backward(dout: Tensor, dlse: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
        tensors, (_, _, bias_gradient, *packed) = inputs[:count], inputs[count:]
        bias = unpack(packed).bias if bias_gradient else None
        return (
            *(empty(x) for x in tensors),
            _no_bias_gradient(tensors[0]) if bias is None else empty(bias),
        )

    torch.library.register_fake(of_forward)(fake_forward)
    torch.library.register_fake(of_backward)(fake_backward)
    operators = torch.ops.flashtrain_kernels
    forward_op = getattr(operators, f"forward{suffix}").default
    backward_op = getattr(operators, f"backward{suffix}").default
    of_gradients = Operator(backward_op, partial(compute_backward, count))
    operator = Operator(forward_op, partial(compute_forward, count), of_gradients, form)
    torch.library.impl(of_forward, _DEVICES, lambda *inputs: _run(operator, inputs))
    torch.library.impl(of_backward, _DEVICES, operator_backward)

    @register_flop_formula(forward_op.overloadpacket)
    def forward_flops(*inputs: Any, out_val: Any = None, **kwargs: Any) -> int:
        return _flops(inputs[0], inputs[count - 1], inputs[count:], 1, 1)

    @register_flop_formula(backward_op.overloadpacket)
    def backward_flops(
        dout: Any, dlse: Any, *inputs: Any, out_val: Any = None, **kwargs: Any
    ) -> int:
        return _flops(inputs[0], inputs[count - 1], inputs[count + 3 :], 3, 2)

    return operator


def _no_bias_gradient(like: Tensor) -> Tensor:
    return like.new_empty((0,))


# A forward multiplies each visible pair twice (QK^T, PV), a backward five times, 2 D or 2 Dv
# operations each. What a Mask or a BlockMask hides is data, which a formula of shapes cannot
# know: it counts as computed.


def visible_pairs(
    seqlen_q: int, seqlen_k: int, left: int | None = None, right: int | None = None
) -> int:
    """Count the pairs of query i and key j with i + left <= j <= i + right; None:
    no bound on that side."""

    def triangle(n: int) -> int:
        return max(n, 0) * (max(n, 0) + 1) // 2

    def rising(start: int) -> int:
        """Return the sum of max(0, i + start) over all queries i."""
        return triangle(seqlen_q - 1 + start) - triangle(start - 1)

    def up_to(shift: int) -> int:
        """Count the pairs with j <= i + shift."""
        return rising(shift + 1) - rising(shift + 1 - seqlen_k)

    total = seqlen_q * seqlen_k if right is None else up_to(right)
    return max(0, total - (0 if left is None else up_to(left - 1)))


def _flops(q: Sequence[int], v: Sequence[int], packed: tuple, of_d: int, of_dv: int) -> int:
    """Return the FLOPs of `of_d` matrix products of D columns and `of_dv` of Dv over the visible
    pairs of the band (a mask is not counted). q, v: shapes (B, S, ..., heads, D or Dv); packed: the
    operator's arguments after its tensors."""
    options = Packed(*packed)
    pairs = visible_pairs(q[1], v[1], options.left, options.right)
    return 2 * q[0] * q[-2] * (of_d * q[-1] + of_dv * v[-1]) * pairs


# By form. Views cost a short call as much as all else, each of them a step of autograd's too: so
# rows and heads first have operators of their own, around the registered ones.
FORWARD_IN = {
    BATCH: _register("", BATCH),
    QKV_PACKED: _register("_qkvpacked", QKV_PACKED),
    KV_PACKED: _register("_kvpacked", KV_PACKED),
}
BACKWARDS = {each.registered: each.backward.registered for each in FORWARD_IN.values()}
FORWARDS = [*BACKWARDS]  # for create_selective_checkpoint_contexts
FORWARD, FORWARD_QKVPACKED, FORWARD_KVPACKED = FORWARDS
BACKWARD, BACKWARD_QKVPACKED, BACKWARD_KVPACKED = BACKWARDS.values()


def _in_form(form: Form, forward: Operator, made: int, back: slice) -> Operator:
    count = len(form.layouts)
    backward = replace(forward.backward, form=form, given=back, made=count)
    return replace(forward, form=form, given=slice(0, count), made=made, backward=backward)


# A backward's arguments are (dout, dlse, the tensors, out, lse, ...), its results as many
# gradients and the bias's.
for _row, _batch in ((ROW, BATCH), (ROW_KV_PACKED, KV_PACKED), (ROW_QKV_PACKED, QKV_PACKED)):
    FORWARD_IN[_row] = _in_form(_row, FORWARD_IN[_batch], 2, slice(0, len(_row.layouts) + 4))
FORWARD_IN[HEADS_FIRST] = _in_form(HEADS_FIRST, FORWARD_IN[BATCH], 0, slice(2, 5))


# --- masks and their plans on a GPU ---------------------------------------------------------------
# On a CPU their own files compute the same numbers, faster than Triton's interpreter, which may
# run attention there.


@torch.library.impl("flashtrain_kernels::plan", "cuda")
def _plan(
    queries: Tensor, keys: Tensor | None, seqlen_k: int, blocks: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    if not dispatch.runs_kernels(queries.device):
        return build_plan_reference(queries, keys, seqlen_k, blocks)
    from .backends.portable.plan import plan  # Triton is imported only where it is used

    return plan(queries.contiguous(), None if keys is None else keys.contiguous(), seqlen_k, blocks)


def _register_mask_operator(name: str) -> None:
    def computed(*arguments: Any) -> Any:
        device = next(x.device for x in arguments if isinstance(x, Tensor))
        if not dispatch.runs_kernels(device):
            return getattr(rows, name)(*arguments)
        from .backends.portable import mask_rows

        with torch.cuda.device(device):
            return getattr(mask_rows, name)(*arguments)

    torch.library.impl(f"flashtrain_kernels::{name}", "cuda", computed)


for _name in SCHEMAS:
    _register_mask_operator(_name)
