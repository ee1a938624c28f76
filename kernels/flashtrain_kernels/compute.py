"""What the operators do with real tensors: run the kernels that dispatch.py chooses, or plain PyTorch.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import dispatch, reference
from .backends import Call
from .masks import rows
from .masks.operators import SCHEMAS
from .masks.plan import build_plan_reference
from .options import Options


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """(out, lse), contiguous."""
    if not dispatch.runs_kernels(q.device):
        out, lse = reference.forward_from(q, k, v, options)
        return out.contiguous(), lse.contiguous()
    _check_interpreter(q.dtype)
    call = Call(_unit_stride(q), _unit_stride(k), _unit_stride(v), options)
    with _on(q.device):
        return dispatch.backend_for(call, "forward").forward(call)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
    gradients: Sequence[Tensor],
    dbias: Tensor | None,
) -> None:
    """Fill gradients = (dq, dk, dv), any strides whose last is 1, and dbias, contiguous, unless it is None."""
    dq, dk, dv = gradients
    if not dispatch.runs_kernels(q.device):
        computed = reference.backward_from(dout, dlse, q, k, v, out, lse, options, dbias is not None)
        for target, gradient in zip((dq, dk, dv, dbias), computed, strict=True):
            if target is not None and gradient is not None:
                target.copy_(gradient)
        return
    call = Call(_unit_stride(q), _unit_stride(k), _unit_stride(v), options)
    dout, dlse = _unit_stride(dout), None if dlse is None else dlse.contiguous()
    with _on(q.device):
        chosen = dispatch.backend_for(call, "backward")
        chosen.backward(call, dout, dlse, _unit_stride(out), lse.contiguous(), (dq, dk, dv), dbias)


def empty(like: Tensor) -> Tensor:
    """Contiguous, unlike empty_like, which keeps the strides of some inputs and not of others."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _unit_stride(x: Tensor) -> Tensor:
    """The kernels take any strides but the last, which must be 1 (an expanded gradient has 0 there): copy only then."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device: make it the tensors' own."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _check_interpreter(dtype: torch.dtype) -> None:
    if dispatch.INTERPRETED and dtype == torch.bfloat16:
        raise ValueError(
            "Triton's interpreter multiplies bfloat16 wrongly: use float16 or float32 with TRITON_INTERPRET=1"
        )


# --- masks and their plans on a GPU ----------------------------------------------------------------------------------
# On a CPU their own files compute them, also where Triton's interpreter runs attention: the numbers are the same, and
# its slowness would buy nothing.


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
