"""The operators of torch.library: forward, backward, their packed forms and fake tensors.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.

    forward(q, k, v, ...) -> (out, lse)            backward(...) -> (dq, dk, dv, dbias)
    forward_qkvpacked(qkv, ...) -> (out, lse)      backward_qkvpacked(...) -> (dqkv, dbias)
    forward_kvpacked(q, kv, ...) -> (out, lse)     backward_kvpacked(...) -> (dq, dkv, dbias)

Every output is contiguous, whatever the inputs' strides are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import dispatch, reference
from .backends import Backend, Call, Direction, Gradients
from .eager import BACKWARD_OF, COMPUTES, computed, pass_of
from .forms import BATCH, HEADS_FIRST, KV_PACKED, QKV_PACKED, ROW, ROW_KV_PACKED, ROW_QKV_PACKED, Form, apart
from .launch_cache import applies, on_device, signature
from .masks import rows
from .masks.operators import SCHEMAS
from .masks.plan import build_plan_reference
from .options import SCHEMA, Options, Packed, pack, unpack

_DEVICES = ("cpu", "cuda")


def backend_for(call: Call, direction: Direction) -> Backend:
    """Return the first backend that supports this call in this direction (forward or backward)."""
    return next(backend for backend in dispatch.BACKENDS if backend.serves(call, direction) is None)


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Compute (out (B, Sq, H, D), lse (B, H, Sq)), contiguous, by kernels or by the reference."""
    if not dispatch.runs_kernels(q.device):
        with torch.autocast(q.device.type, enabled=False):  # its products are in the tensors' own dtype
            out, lse = reference.forward_from(q, k, v, options)
        return out.contiguous(), lse.contiguous()
    check_interpreter(q.dtype)
    call = Call(unit_stride(q), unit_stride(k), unit_stride(v), options)
    with on_device(q.device):
        return backend_for(call, "forward").forward(call)


def backward(q: Tensor, k: Tensor, v: Tensor, options: Options, given: Gradients) -> None:
    """Fill the gradient tensors in `given`, by kernels or by the reference."""
    dout, dlse, out, lse, *targets = given
    if not dispatch.runs_kernels(q.device):
        with torch.autocast(q.device.type, enabled=False):
            computed = reference.backward_from(dout, dlse, q, k, v, out, lse, options, given.dbias is not None)
        for target, gradient in zip(targets, computed, strict=True):
            if target is not None and gradient is not None:
                target.copy_(gradient)
        return
    call = Call(unit_stride(q), unit_stride(k), unit_stride(v), options)
    dlse = None if dlse is None else dlse.contiguous()
    given = given._replace(dout=unit_stride(dout), dlse=dlse, out=unit_stride(out), lse=lse.contiguous())
    with on_device(q.device):
        backend_for(call, "backward").backward(call, given)


def empty(like: Tensor) -> Tensor:
    """Allocate a contiguous tensor of like's shape, dtype and device (torch.empty_like may copy the strides)."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def unit_stride(x: Tensor) -> Tensor:
    """Return x, copied if its last stride is not 1 (as in an expanded gradient): kernels take any other strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def check_interpreter(dtype: torch.dtype) -> None:
    if dispatch.INTERPRETED and dtype == torch.bfloat16:
        raise ValueError(
            "Triton's interpreter multiplies bfloat16 wrongly: use float16 or float32 with TRITON_INTERPRET=1"
        )


def _run(operator: Any, inputs: tuple) -> Any:
    if applies(inputs[0].device):
        call, tensors = pass_of(operator, inputs)
        signed = signature(tensors)
        if signed is not None:
            return call(tensors, signed)
    return COMPUTES[operator](*inputs)


def _register(suffix: str, names: tuple[str, ...]) -> tuple[Any, Any]:
    """Define the forward and the backward on tensors of these names, with all that torch asks of an operator."""
    of_forward, of_backward = f"flashtrain_kernels::forward{suffix}", f"flashtrain_kernels::backward{suffix}"
    given, count = ", ".join(f"Tensor {name}" for name in names), len(names)
    gradients = ", ".join(["Tensor"] * (count + 1))
    saved = "Tensor out, Tensor lse, bool bias_gradient"
    tags = torch.Tag.pt2_compliant_tag
    torch.library.define(of_forward, f"({given}, {SCHEMA}) -> (Tensor, Tensor)", tags=tags)
    schema = f"(Tensor dout, Tensor? dlse, {given}, {saved}, {SCHEMA}) -> ({gradients})"
    torch.library.define(of_backward, schema, tags=tags)

    def compute_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        return forward(*apart(inputs[:count]), unpack(inputs[count:]))

    def compute_backward(dout: Tensor, dlse: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
        tensors, (out, lse, bias_gradient, *packed) = inputs[:count], inputs[count:]
        options = unpack(packed)
        results = tuple(empty(x) for x in tensors)
        dbias = empty(options.bias) if bias_gradient and options.bias is not None else None
        backward(*apart(tensors), options, Gradients(dout, dlse, out, lse, *apart(results), dbias))
        return results if dbias is None else (*results, dbias)

    def operator_backward(*inputs: Any) -> tuple[Tensor, ...]:
        results = _run(backward_op, inputs)  # an operator cannot return None
        return results if len(results) > count else (*results, _no_bias_gradient(results[0]))

    def fake_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        q = apart(inputs[:count])[0]
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return empty(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse_dtype)

    def fake_backward(dout: Tensor, dlse: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
        tensors, (_, _, bias_gradient, *packed) = inputs[:count], inputs[count:]
        bias = unpack(packed).bias if bias_gradient else None
        return (*(empty(x) for x in tensors), _no_bias_gradient(tensors[0]) if bias is None else empty(bias))

    torch.library.register_fake(of_forward)(fake_forward)
    torch.library.register_fake(of_backward)(fake_backward)
    operators = torch.ops.flashtrain_kernels
    forward_op = getattr(operators, f"forward{suffix}").default
    backward_op = getattr(operators, f"backward{suffix}").default
    COMPUTES[forward_op], COMPUTES[backward_op] = compute_forward, compute_backward
    torch.library.impl(of_forward, _DEVICES, lambda *inputs: _run(forward_op, inputs))
    torch.library.impl(of_backward, _DEVICES, operator_backward)

    @register_flop_formula(forward_op.overloadpacket)
    def forward_flops(*inputs: Any, out_val: Any = None, **kwargs: Any) -> int:
        return _flops(inputs[0], inputs[count - 1], inputs[count:], 2)

    @register_flop_formula(backward_op.overloadpacket)
    def backward_flops(dout: Any, dlse: Any, *inputs: Any, out_val: Any = None, **kwargs: Any) -> int:
        return _flops(inputs[0], inputs[count - 1], inputs[count + 3 :], 5)

    return forward_op, backward_op


def _no_bias_gradient(like: Tensor) -> Tensor:
    return like.new_empty((0,))


# A forward multiplies each visible pair twice (QK^T, PV), a backward five times, 2 D operations each. What a Mask or a
# BlockMask hides is data, which a formula of shapes cannot know: it counts as computed.


def visible_pairs(seqlen_q: int, seqlen_k: int, left: int | None = None, right: int | None = None) -> int:
    """Count the pairs of query i and key j with i + left <= j <= i + right; None: no bound on that side."""

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


def _flops(q: Sequence[int], k: Sequence[int], packed: tuple, products: int) -> int:
    """q, k: shapes (B, S, ..., heads, D). packed: the operator's arguments after its tensors."""
    options = Packed(*packed)
    return products * 2 * q[0] * q[-2] * q[-1] * visible_pairs(q[1], k[1], options.left, options.right)


FORWARD, BACKWARD = _register("", ("q", "k", "v"))
FORWARD_QKVPACKED, BACKWARD_QKVPACKED = _register("_qkvpacked", ("qkv",))
FORWARD_KVPACKED, BACKWARD_KVPACKED = _register("_kvpacked", ("q", "kv"))
FORWARDS = [FORWARD, FORWARD_QKVPACKED, FORWARD_KVPACKED]  # for create_selective_checkpoint_contexts
FORWARD_OF = {3: FORWARD, 1: FORWARD_QKVPACKED, 2: FORWARD_KVPACKED}  # by the number of tensors
BACKWARDS = {FORWARD: BACKWARD, FORWARD_QKVPACKED: BACKWARD_QKVPACKED, FORWARD_KVPACKED: BACKWARD_KVPACKED}
BACKWARD_OF.update(BACKWARDS)


# --- other forms of the tensors --------------------------------------------------------------------------------------
# Views cost a short call as much as all else, each of them a step of autograd's too.


def _to_row(x: Tensor) -> Tensor:
    return x.detach().squeeze_(0)  # no view: autograd lets nobody write into a view that a Function returns


def _to_heads_first(x: Tensor) -> Tensor:
    return x.detach().transpose_(1, 2)


def _in_form(call: Callable, form: Form, given: slice, made: int, back: Callable) -> Callable:
    """call, an operator or what computes it, with these arguments, and the first `made` results, in another form."""

    def in_form(*inputs: Any) -> tuple[Tensor, ...]:
        before, after = inputs[: given.start], inputs[given.stop :]
        results = call(*before, *[None if x is None else form.to_batch(x) for x in inputs[given]], *after)
        return (*[back(x) for x in results[:made]], *results[made:])

    return in_form


# By form: the forward operator, for rows and heads first a function around it.
FORWARD_IN: dict[Form, Any] = {BATCH: FORWARD, KV_PACKED: FORWARD_KVPACKED, QKV_PACKED: FORWARD_QKVPACKED}


def _register_form(
    form: Form, forward_op: Any, forward_form: tuple[slice, int], backward_form: tuple[slice, int], back: Callable
) -> None:
    registered = []
    for operator, (given, made) in ((forward_op, forward_form), (BACKWARDS[forward_op], backward_form)):
        in_form = _in_form(operator, form, given, made, back)
        COMPUTES[in_form] = _in_form(COMPUTES[operator], form, given, made, back)
        registered.append(in_form)
    FORWARD_IN[form], BACKWARD_OF[registered[0]] = registered


# A backward's arguments are (dout, dlse, the tensors, out, lse, ...), its results as many gradients and the bias's.
for _row, _batch in ((ROW, BATCH), (ROW_KV_PACKED, KV_PACKED), (ROW_QKV_PACKED, QKV_PACKED)):
    _count = len(_row.layouts)
    _register_form(_row, FORWARD_IN[_batch], (slice(0, _count), 2), (slice(0, _count + 4), _count), _to_row)
_register_form(HEADS_FIRST, FORWARD, (slice(0, 3), 0), (slice(2, 5), 3), _to_heads_first)


def attention(tensors: tuple[Tensor, ...], options: Options, form: Form = BATCH) -> tuple[Tensor, Tensor | None]:
    """Compute checked attention, differentiable in tensors and options.bias, by torch's registered operators: (out (B,
    Sq, H, D), natural log-sum-exp (B, H, Sq) float32); both lack B where `form` is that of a packed row."""
    packed = pack(options)
    # Compilers and transforms (vmap, torch.func.grad) go by what is registered.
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        out, lse = FORWARD_OF[len(tensors)](*[form.to_batch(x) for x in tensors], *packed)
        return form.of_batch(out, lse)
    call, given = pass_of(FORWARD_IN[form], (*tensors, *packed))
    return computed(call, given, signature(given))


# --- masks and their plans on a GPU ----------------------------------------------------------------------------------
# On a CPU their own files compute the same numbers, faster than Triton's interpreter, which may run attention there.


@torch.library.impl("flashtrain_kernels::plan", "cuda")
def _plan(queries: Tensor, keys: Tensor | None, seqlen_k: int, blocks: list[int]) -> tuple[Tensor, Tensor, Tensor]:
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
