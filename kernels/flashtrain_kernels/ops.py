"""The operators of torch.library: forward, backward, their packed forms, fake tensors, autograd and FLOP formulas.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.

    flashtrain_kernels::forward(q, k, v, ...) -> (out, lse)         flashtrain_kernels::backward(...) -> (dq, dk, dv)
    flashtrain_kernels::forward_packed(qkv, ...) -> (out, lse)      flashtrain_kernels::backward_packed(...) -> dqkv

The backward is an operator of its own, so that torch.compile sees both; the packed pair writes dq, dk and dv into
slices of
one tensor, so that a fused QKV projection costs no copy. Every output is contiguous, whatever the inputs' strides are.
Selective checkpointing keeps attention's outputs with create_selective_checkpoint_contexts([FORWARD, FORWARD_PACKED]).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import dispatch, reference
from .masks import Documents, visible_pairs

_DEVICES = ("cpu", "cuda")
_OPTIONS = "Tensor? document_start, Tensor? document_end, float scale, bool causal"


def _define(name: str, schema: str) -> None:
    torch.library.define(f"flashtrain_kernels::{name}", schema, tags=torch.Tag.pt2_compliant_tag)


_define("forward", f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
_define("forward_packed", f"(Tensor qkv, {_OPTIONS}) -> (Tensor, Tensor)")
_define(
    "backward",
    f"(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor)",
)
_define("backward_packed", f"(Tensor dout, Tensor? dlse, Tensor qkv, Tensor out, Tensor lse, {_OPTIONS}) -> Tensor")

FORWARD = torch.ops.flashtrain_kernels.forward.default
FORWARD_PACKED = torch.ops.flashtrain_kernels.forward_packed.default
BACKWARD = torch.ops.flashtrain_kernels.backward.default
BACKWARD_PACKED = torch.ops.flashtrain_kernels.backward_packed.default

# --- what runs on real tensors ---------------------------------------------------------------------------------------


def _compute_forward(q, k, v, start, end, scale, causal) -> tuple[torch.Tensor, torch.Tensor]:
    documents = None if start is None else Documents(start.contiguous(), end.contiguous())
    if not dispatch.runs_kernels(q.device):
        result = reference.attention(
            q, k, v, softmax_scale=scale, causal=causal, documents=documents, return_lse=True
        )  # fmt: skip
        return result[0].contiguous(), result[1].contiguous()
    from .portable.forward import forward  # Triton is imported only where it is used

    _check_interpreter(q.dtype)
    q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
    with _on(q.device):
        tile = dispatch.tiles_for(q.device, q.shape[3], q.dtype).forward
        return forward(q, k, v, documents, scale, causal, tile, tf32=not dispatch.INTERPRETED)


def _compute_backward(dout, dlse, q, k, v, out, lse, start, end, scale, causal, dq, dk, dv) -> None:
    """Fill dq, dk and dv."""
    documents = None if start is None else Documents(start.contiguous(), end.contiguous())
    if not dispatch.runs_kernels(q.device):
        gradients = reference.attention_backward(
            dout, dlse, q, k, v, out, lse, softmax_scale=scale, causal=causal, documents=documents
        )
        for target, gradient in zip((dq, dk, dv), gradients, strict=True):
            target.copy_(gradient)
        return
    from .portable.backward import backward

    q, k, v, dout = _unit_stride(q), _unit_stride(k), _unit_stride(v), _unit_stride(dout)
    out = _unit_stride(out)
    dlse = None if dlse is None else dlse.contiguous()
    with _on(q.device):
        tiles = dispatch.tiles_for(q.device, q.shape[3], q.dtype)
        backward(
            dout, dlse, q, k, v, out, lse.contiguous(), documents, scale, causal, dq, dk, dv, tiles.dkdv, tiles.dq,
            tf32=not dispatch.INTERPRETED,
        )  # fmt: skip


@torch.library.impl("flashtrain_kernels::forward", _DEVICES)
def _forward(q, k, v, document_start, document_end, scale, causal):
    return _compute_forward(q, k, v, document_start, document_end, scale, causal)


@torch.library.impl("flashtrain_kernels::forward_packed", _DEVICES)
def _forward_packed(qkv, document_start, document_end, scale, causal):
    q, k, v = qkv.unbind(2)
    return _compute_forward(q, k, v, document_start, document_end, scale, causal)


@torch.library.impl("flashtrain_kernels::backward", _DEVICES)
def _backward(dout, dlse, q, k, v, out, lse, document_start, document_end, scale, causal):
    dq, dk, dv = _empty(q), _empty(k), _empty(v)
    _compute_backward(
        dout, dlse, q, k, v, out, lse, document_start, document_end, scale, causal, dq, dk, dv
    )  # fmt: skip
    return dq, dk, dv


@torch.library.impl("flashtrain_kernels::backward_packed", _DEVICES)
def _backward_packed(dout, dlse, qkv, out, lse, document_start, document_end, scale, causal):
    dqkv = _empty(qkv)
    q, k, v = qkv.unbind(2)
    dq, dk, dv = dqkv.unbind(2)
    _compute_backward(
        dout, dlse, q, k, v, out, lse, document_start, document_end, scale, causal, dq, dk, dv
    )  # fmt: skip
    return dqkv


def _empty(like: torch.Tensor) -> torch.Tensor:
    """Contiguous, unlike empty_like, which keeps the strides of some inputs and not of others."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    """The kernels take any strides but the last, which must be 1 (an expanded gradient has 0 there): copy only then."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _on(device: torch.device) -> Any:
    """Triton launches on the current device: make it the tensors' own."""
    return torch.cuda.device(device) if device.type == "cuda" else _NO_CONTEXT


class _NoContext:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_NO_CONTEXT = _NoContext()


def _check_interpreter(dtype: torch.dtype) -> None:
    if dispatch.INTERPRETED and dtype == torch.bfloat16:
        raise ValueError(
            "Triton's interpreter multiplies bfloat16 wrongly: use float16 or float32 with TRITON_INTERPRET=1"
        )


# --- fake tensors: shapes and strides without data -------------------------------------------------------------------


@torch.library.register_fake("flashtrain_kernels::forward")
def _fake_forward(q, k, v, document_start, document_end, scale, causal):
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _empty(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse_dtype)


@torch.library.register_fake("flashtrain_kernels::forward_packed")
def _fake_forward_packed(qkv, document_start, document_end, scale, causal):
    q, k, v = qkv.unbind(2)
    return _fake_forward(q, k, v, document_start, document_end, scale, causal)


@torch.library.register_fake("flashtrain_kernels::backward")
def _fake_backward(dout, dlse, q, k, v, out, lse, document_start, document_end, scale, causal):
    return _empty(q), _empty(k), _empty(v)


@torch.library.register_fake("flashtrain_kernels::backward_packed")
def _fake_backward_packed(dout, dlse, qkv, out, lse, document_start, document_end, scale, causal):
    return _empty(qkv)


# --- autograd --------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, start, end, scale, causal = inputs
    ctx.save_for_backward(*tensors, *output, start, end)
    ctx.options = (scale, causal)
    # An output nobody used has the gradient None instead of a tensor of zeros to fill and read.
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple:
    *tensors, out, lse, start, end = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * (len(tensors) + 4)
    dout = torch.zeros_like(out) if dout is None else dout
    if len(tensors) == 3:
        gradients = BACKWARD(dout, dlse, *tensors, out, lse, start, end, *ctx.options)
    else:
        gradients = (BACKWARD_PACKED(dout, dlse, *tensors, out, lse, start, end, *ctx.options),)
    return (*gradients, None, None, None, None)


torch.library.register_autograd("flashtrain_kernels::forward", _autograd_backward, setup_context=_save)
torch.library.register_autograd("flashtrain_kernels::forward_packed", _autograd_backward, setup_context=_save)


# --- FLOPs, for torch.utils.flop_counter -----------------------------------------------------------------------------
# A forward multiplies each visible pair twice (QK^T, PV), a backward five times, 2 D operations each. What documents
# hide
# is data, which a formula of shapes cannot know: it counts as computed.


def _flops(q: Sequence[int], seqlen_k: int, causal: bool, products: int) -> int:
    batch, seqlen_q, heads, head_dim = q
    return products * 2 * batch * heads * head_dim * visible_pairs(seqlen_q, seqlen_k, causal)


@register_flop_formula(torch.ops.flashtrain_kernels.forward)
def _forward_flops(q, k, v, document_start, document_end, scale, causal, *args, out_val=None, **kwargs) -> int:
    return _flops(q, k[1], causal, 2)


@register_flop_formula(torch.ops.flashtrain_kernels.forward_packed)
def _forward_packed_flops(qkv, document_start, document_end, scale, causal, *args, out_val=None, **kwargs) -> int:
    return _flops((qkv[0], qkv[1], qkv[3], qkv[4]), qkv[1], causal, 2)


@register_flop_formula(torch.ops.flashtrain_kernels.backward)
def _backward_flops(dout, dlse, q, k, v, out, lse, document_start, document_end, scale, causal, *args, **kwargs) -> int:
    return _flops(q, k[1], causal, 5)


@register_flop_formula(torch.ops.flashtrain_kernels.backward_packed)
def _backward_packed_flops(
    dout, dlse, qkv, out, lse, document_start, document_end, scale, causal, *args, **kwargs
) -> int:
    return _flops(dout, qkv[1], causal, 5)
