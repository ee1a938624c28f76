"""The operators of torch.library: forward, backward, their packed forms, fake tensors and FLOP formulas.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.

    forward(q, k, v, ...) -> (out, lse)            backward(...) -> (dq, dk, dv, dbias)
    forward_qkvpacked(qkv, ...) -> (out, lse)      backward_qkvpacked(...) -> (dqkv, dbias)
    forward_kvpacked(q, kv, ...) -> (out, lse)     backward_kvpacked(...) -> (dq, dkv, dbias)

The backward is an operator of its own, so that torch.compile sees both; the packed ones write the gradients into
slices of one tensor, so that a fused projection costs no copy. Every output is contiguous, whatever the inputs'
strides are. Selective checkpointing keeps attention's outputs with create_selective_checkpoint_contexts(FORWARDS).
compute.py does the work on real tensors, autograd.py makes the operators differentiable.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import compute
from .options import SCHEMA, Options, Packed, unpack

_DEVICES = ("cpu", "cuda")


def apart(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """q, k and v of (q, k, v), (q, kv) or (qkv,), where those packed lie side by side in dimension 2."""
    if len(tensors) == 3:
        return tensors
    return (*tensors[:-1], *tensors[-1].unbind(2))


def _register(suffix: str, names: tuple[str, ...]) -> tuple[Any, Any]:
    """Define the forward and the backward on tensors of these names, with all that torch asks of an operator."""
    forward, backward = f"flashtrain_kernels::forward{suffix}", f"flashtrain_kernels::backward{suffix}"
    given, count = ", ".join(f"Tensor {name}" for name in names), len(names)
    gradients = ", ".join(["Tensor"] * (count + 1))
    saved = "Tensor out, Tensor lse, bool bias_gradient"
    tags = torch.Tag.pt2_compliant_tag
    torch.library.define(forward, f"({given}, {SCHEMA}) -> (Tensor, Tensor)", tags=tags)
    schema = f"(Tensor dout, Tensor? dlse, {given}, {saved}, {SCHEMA}) -> ({gradients})"
    torch.library.define(backward, schema, tags=tags)

    def run_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        return compute.forward(*apart(inputs[:count]), unpack(inputs[count:]))

    def run_backward(dout: Tensor, dlse: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
        tensors, (out, lse, bias_gradient, *packed) = inputs[:count], inputs[count:]
        options = unpack(packed)
        results = tuple(compute.empty(x) for x in tensors)
        dbias = _empty_bias_gradient(tensors[0], options, bias_gradient)
        compute.backward(
            dout, dlse, *apart(tensors), out, lse, options, apart(results), dbias if bias_gradient else None
        )
        return (*results, dbias)

    def fake_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        q = apart(inputs[:count])[0]
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return compute.empty(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse_dtype)

    def fake_backward(dout: Tensor, dlse: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
        tensors, (_, _, bias_gradient, *packed) = inputs[:count], inputs[count:]
        dbias = _empty_bias_gradient(tensors[0], unpack(packed), bias_gradient)
        return (*(compute.empty(x) for x in tensors), dbias)

    torch.library.impl(forward, _DEVICES, run_forward)
    torch.library.impl(backward, _DEVICES, run_backward)
    torch.library.register_fake(forward)(fake_forward)
    torch.library.register_fake(backward)(fake_backward)
    operators = torch.ops.flashtrain_kernels
    of_forward = getattr(operators, f"forward{suffix}").default
    of_backward = getattr(operators, f"backward{suffix}").default

    @register_flop_formula(of_forward.overloadpacket)
    def forward_flops(*inputs: Any, out_val: Any = None, **kwargs: Any) -> int:
        return _flops(inputs[0], inputs[count - 1], inputs[count:], 2)

    @register_flop_formula(of_backward.overloadpacket)
    def backward_flops(dout: Any, dlse: Any, *inputs: Any, out_val: Any = None, **kwargs: Any) -> int:
        return _flops(inputs[0], inputs[count - 1], inputs[count + 3 :], 5)

    return of_forward, of_backward


def _empty_bias_gradient(like: Tensor, options: Options, wanted: bool) -> Tensor:
    """An operator cannot return None: without a gradient for the bias, an empty tensor."""
    if not wanted or options.bias is None:
        return like.new_empty((0,))
    return compute.empty(options.bias)


# A forward multiplies each visible pair twice (QK^T, PV), a backward five times, 2 D operations each. What a Mask or a
# BlockMask hides is data, which a formula of shapes cannot know: it counts as computed.


def visible_pairs(seqlen_q: int, seqlen_k: int, left: int | None = None, right: int | None = None) -> int:
    """How many pairs i + left <= j <= i + right there are; None: no bound on that side."""

    def triangle(n: int) -> int:
        return max(n, 0) * (max(n, 0) + 1) // 2

    def rising(start: int) -> int:
        """The sum of max(0, i + start) over the queries i."""
        return triangle(seqlen_q - 1 + start) - triangle(start - 1)

    def up_to(shift: int) -> int:
        """Pairs with j <= i + shift: the sum of i + shift + 1, held between 0 and Sk."""
        return rising(shift + 1) - rising(shift + 1 - seqlen_k)

    total = seqlen_q * seqlen_k if right is None else up_to(right)
    return max(0, total - (0 if left is None else up_to(left - 1)))


def _flops(q: Sequence[int], k: Sequence[int], packed: tuple, products: int) -> int:
    """q, k: shapes (B, S, ..., heads, D). packed: the operator's arguments after its tensors."""
    options = Packed(*packed)
    return products * 2 * q[0] * q[-2] * q[-1] * visible_pairs(q[1], k[1], options.left, options.right)


FORWARD, BACKWARD = _register("", ("q", "k", "v"))
FORWARD_QKVPACKED, BACKWARD_QKVPACKED = _register("_qkvpacked", ("qkv",))
FORWARD_KVPACKED, BACKWARD_KVPACKED = _register("_kvpacked", ("q", "kv"))
FORWARDS = [FORWARD, FORWARD_QKVPACKED, FORWARD_KVPACKED]
FORWARD_OF = {3: FORWARD, 1: FORWARD_QKVPACKED, 2: FORWARD_KVPACKED}  # by the number of tensors
BACKWARDS = {FORWARD: BACKWARD, FORWARD_QKVPACKED: BACKWARD_QKVPACKED, FORWARD_KVPACKED: BACKWARD_KVPACKED}
