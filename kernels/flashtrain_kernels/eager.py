"""Operators in eager mode: one small autograd.Function differentiates them, and repeated
launches come from a cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .backends import Gradients
from .forms import BATCH, Form, apart
from .launch_cache import Bounded, Signature, applies, record, signature
from .options import Options, Packed, pack, unpack


@dataclass(frozen=True, eq=False)  # hashed by identity
class Operator:
    """Attention's forward or backward on tensors in one form; its last arguments are
    the fields of options.Packed.

    torch's dispatcher and registered autograd take most of a short call's time, so eager mode
    calls `compute`. Compilers, transforms (transforms.py) and torch modes get `registered`.
    """

    registered: Any  # with torch.library, on tensors in the form BATCH, KV_PACKED or QKV_PACKED
    compute: Callable  # what it computes
    backward: Any = None  # of a forward: the backward's Operator
    form: Form = BATCH
    given: slice | None = None  # the arguments to bring from `form` to the registered one's
    made: int = 0  # how many results to bring back

    def call(self, function: Callable, inputs: Sequence[Any]) -> Any:
        """Return function(*inputs), where inputs and results are in this form; function is
        `registered` or `compute`."""
        given, form = self.given, self.form
        if given is None:
            return function(*inputs)
        turned = [None if x is None else form.to_batch(x) for x in inputs[given]]
        results = function(*inputs[: given.start], *turned, *inputs[given.stop :])
        return (*[form.bare(x) for x in results[: self.made]], *results[self.made :])


class Pass:
    """An Operator with its plain arguments bound: call it with the tensor arguments, in order."""

    def __init__(self, operator: Operator, arguments: tuple[Any, ...]) -> None:
        self.operator, self.arguments = operator, arguments
        self.places = [place for place, x in enumerate(arguments) if x is Tensor]
        # Of a forward: the tensors before the options'.
        self.count = len(arguments) - len(Packed._fields)
        # By whether dlse is missing and dbias is wanted.
        self.backwards: dict[tuple[bool, bool], Pass] = {}

    def filled(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return the operator's arguments, with `tensors` in the places of the tensor arguments."""
        arguments = list(self.arguments)
        for place, x in zip(self.places, tensors, strict=True):
            arguments[place] = x
        return arguments

    def __call__(self, tensors: Sequence[Tensor], signed: Signature | None) -> Any:
        """Return the results on tensors of this `signature`; the second call records the
        launches for later ones. With signed=None the operator itself is called, as somebody
        may watch or change it."""
        if signed is None:
            return self.operator.call(self.operator.registered, self.filled(tensors))
        key = self, signed
        known = _KNOWN.get(key)
        if known is not None and type(known) is not str and not known.watched():
            return known(tensors)
        if known is None:
            _KNOWN[key] = "seen" if applies(tensors[0].device) else "refused"
        elif known == "seen":
            _KNOWN[key] = "refused"
            recording = record(self._computed, tensors)
            if recording is not None:
                results, repeated = recording
                _KNOWN[key] = repeated or "refused"
                return results
        return self._computed(tensors)

    def _computed(self, tensors: Sequence[Tensor]) -> Any:
        return self.operator.call(self.operator.compute, self.filled(tensors))


_PASSES: Bounded[tuple[Any, ...], Pass] = Bounded(4096)
# By signature: a compiled.Repeated, some 20 KB, or "seen" (to be recorded the
# next time) or "refused".
_KNOWN: Bounded[tuple[Any, ...], Any] = Bounded(4096)


def pass_of(operator: Operator, inputs: Sequence[Any]) -> tuple[Pass, list[Tensor]]:
    """Return an operator's Pass (a call without its tensors, cached) for these inputs, and
    the tensors among them."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    arguments = tuple(
        [Tensor if isinstance(x, Tensor) else tuple(x) if type(x) is list else x for x in inputs]
    )
    # 0 and 0.0 are equal keys, and as arguments of an operator they have been made alike.
    known = _PASSES.get((operator, arguments))
    if known is None:
        known = _PASSES[operator, arguments] = Pass(operator, arguments)
    return known, tensors


def attention(
    operator: Operator, tensors: tuple[Tensor, ...], options: Options
) -> tuple[Tensor, Tensor | None]:
    """Compute checked attention by a forward (of ops.FORWARD_IN), differentiable in
    tensors and options.bias.

    Returns:
        out (B, Sq, H, D), natural log-sum-exp (B, H, Sq), float32 (float64 for float64); both lack
        B in the form of a packed row.
    """
    packed, form = pack(options), operator.form
    # Compilers and transforms (vmap, torch.func.grad) go by what is registered.
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return form.of_batch(*operator.registered(*[form.to_batch(x) for x in tensors], *packed))
    call, given = pass_of(operator, (*tensors, *packed))
    return computed(call, given, signature(given))


def computed(
    call: Pass, tensors: Sequence[Tensor], signed: Signature | None, with_lse: bool = True
) -> tuple[Tensor, Any]:
    """Return (out, lse) of a forward Pass in eager mode, differentiable. signed: the
    tensors' launch_cache.signature or None. Without with_lse, lse may be None: each
    differentiable result takes time."""
    if not torch.is_grad_enabled():
        return call(tensors, signed)
    output = (_Eager.apply if signed is None else _apply_plain)((call, signed, with_lse), *tensors)
    return output if with_lse else (output, None)


class _Eager(torch.autograd.Function):
    """Attention in eager mode as autograd.Function: its inputs are the call's tensors, without
    None.

    What it saves, and in which order, is the same whether launches are repeated or not, because
    activation checkpointing compares the saved tensors of a recomputation.
    """

    @staticmethod
    def forward(
        ctx: Any, how: tuple[Pass, Signature | None, bool], *tensors: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        call, signed, with_lse = how
        output = call(tensors, signed)
        # As the backward takes them.
        ctx.save_for_backward(*tensors[: call.count], *output, *tensors[call.count :])
        ctx.call = call
        # An output nobody used has the gradient None instead of a tensor of zeros to fill and read.
        ctx.set_materialize_grads(False)
        return output if with_lse else output[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple:
        call, saved = ctx.call, ctx.saved_tensors
        count = call.count
        rest = (None,) * (len(saved) - count - 2)  # the options' tensors
        if dout is None and dlse is None:
            return (None, *(None,) * count, *rest)
        dout = torch.zeros_like(saved[count]) if dout is None else dout
        wants_bias = call.arguments[count] is not None and ctx.needs_input_grad[1 + count]
        given = (dout, *saved) if dlse is None else (dout, dlse, *saved)
        known = call.backwards.get((dlse is None, wants_bias))
        if known is None:
            arguments = (
                Tensor,
                None if dlse is None else Tensor,
                *call.arguments[:count],
                Tensor,
                Tensor,
                wants_bias,
            )
            known = Pass(call.operator.backward, (*arguments, *call.arguments[count:]))
            call.backwards[dlse is None, wants_bias] = known
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                results = known(given, signature(given))
            results = without_derivative(results, given)
        else:
            results = known(given, signature(given))
        if wants_bias:
            return (None, *results, *rest[1:])
        return (None, *results[:count], *rest)  # operators return an empty one for the bias


# Function.apply looks for transforms first, which a signature says there are none of.
_apply_plain = super(torch.autograd.Function, _Eager).apply


def without_derivative(gradients: Sequence[Tensor], given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients that a backward with create_graph=True computed, such that a second
    derivative raises NotImplementedError instead of silently leaving out how they depend on
    `given`, the backward's inputs."""
    return _NoDerivative.apply(len(gradients), *gradients, *given)


class _NoDerivative(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([x.view_as(x) for x in tensors[:count]])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        """Save nothing for the backward, which only raises."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        raise NotImplementedError(
            "attention has no second derivative: for one, use torch's "
            "scaled_dot_product_attention with SDPBackend.MATH"
        )


# --- what the operators compute; `count` is of the tensors: q, k, v; q, kv; or qkv ----------------


def compute_forward(count: int, *inputs: Any) -> tuple[Tensor, Tensor]:
    """Return (out, lse) for the arguments `inputs` of a forward operator, of which the first
    `count` are q, k, v or the packed tensors."""
    return dispatch.forward(*apart(inputs[:count]), unpack(inputs[count:]))


def compute_backward(
    count: int, dout: Tensor, dlse: Tensor | None, *inputs: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of the `count` tensors (q, k, v or the packed ones), and the bias's if
    it is requested, for a backward operator's arguments: dout, dlse, `inputs`."""
    tensors, (out, lse, bias_gradient, *packed) = inputs[:count], inputs[count:]
    options = unpack(packed)
    results = tuple([empty(x) for x in tensors])
    dbias = empty(options.bias) if bias_gradient and options.bias is not None else None
    dispatch.backward(
        *apart(tensors), options, Gradients(dout, dlse, out, lse, *apart(results), dbias)
    )
    return results if dbias is None else (*results, dbias)


def empty(like: Tensor) -> Tensor:
    """Allocate a contiguous tensor of like's shape, dtype and device (torch.empty_like
    may copy the strides)."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)
