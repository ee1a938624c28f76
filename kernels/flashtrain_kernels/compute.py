"""What the operators do with real tensors: choose, prepare, and run the Triton kernels or the reference.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from . import dispatch, fast_path, reference
from .dispatch import Kind, Tiles
from .masks import BlockMask, Mask
from .options import Options


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """(out, lse), contiguous."""
    if not dispatch.runs_kernels(q.device):
        out, lse = reference.forward_from(q, k, v, options)
        return out.contiguous(), lse.contiguous()
    _check_interpreter(q.dtype)
    q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
    with _on(q.device):
        if fast_path.forward_refusal(q, k, v, options) is None:
            from .backends.hopper import forward_tiles
            from .backends.hopper.forward import forward as run_hopper

            options = _prepared(options, q, hopper=True)
            return run_hopper(q, k, v, options, forward_tiles.forward_tile(q, k, options))
        from .backends.portable.forward import forward as run  # Triton is imported only where it is used

        options = _prepared(options, q)
        return run(q, k, v, options, _tiles(q, k, options).forward, tf32=not dispatch.INTERPRETED)


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
    q, k, v, dout, out = _unit_stride(q), _unit_stride(k), _unit_stride(v), _unit_stride(dout), _unit_stride(out)
    dlse = None if dlse is None else dlse.contiguous()
    with _on(q.device):
        if fast_path.backward_refusal(q, k, v, options) is None:
            from .backends.hopper.backward import backward as run_hopper

            options = _prepared(options, q, hopper=True)
            run_hopper(dout, dlse, q, k, v, out, lse.contiguous(), options, (dq, dk, dv))
            return
        from .backends.portable.backward import backward as run

        options = _prepared(options, q)
        run(
            dout, dlse, q, k, v, out, lse.contiguous(), options, (dq, dk, dv), dbias, _tiles(q, k, options),
            tf32=not dispatch.INTERPRETED,
        )  # fmt: skip


def empty(like: Tensor) -> Tensor:
    """Contiguous, unlike empty_like, which keeps the strides of some inputs and not of others."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _prepared(options: Options, q: Tensor, hopper: bool = False) -> Options:
    """Tensors as the kernels read them: contiguous, and a mask with a plan for the tiles that this call gets."""
    mask, slopes = options.mask, options.alibi_slopes
    if isinstance(mask, Mask):
        mask = mask._replace(
            queries=mask.queries.contiguous(), keys=None if mask.keys is None else mask.keys.contiguous()
        )
        if hopper:
            blocks = fast_path.plan_blocks(mask, q.shape[3], q.dtype, options.rich)
        else:
            blocks = dispatch.plan_blocks(q.device, q.shape[3], q.dtype, options.rich)
        mask = mask.planned_for(blocks)
    return replace(options, mask=mask, alibi_slopes=None if slopes is None else slopes.contiguous())


def kind_of(q: Tensor, k: Tensor, options: Options) -> Kind:
    """What of the call, besides device, head dimension and dtype, decides its tiles."""
    mask = options.mask
    band = mask is None and k.shape[1] <= dispatch.SHORT
    return Kind(
        short=band and options.right is None,
        short_causal=band and options.right is not None,
        window=options.left is not None,
        blocks=isinstance(mask, BlockMask),
        intervals=isinstance(mask, Mask),
        scattered=isinstance(mask, Mask) and (mask.keys is not None or mask.queries.shape[0] > 5),
        permuted=isinstance(mask, Mask) and mask.keys is not None,
        grouped=q.shape[2] != k.shape[2],
        grouped_blocks=q.shape[2] != k.shape[2] and isinstance(mask, BlockMask),
        rich=options.rich,
    )


def _tiles(q: Tensor, k: Tensor, options: Options) -> Tiles:
    mask = options.mask
    return dispatch.tiles_for(
        q.device,
        q.shape[3],
        q.dtype,
        kind_of(q, k, options),
        blocks=mask.plan.blocks if isinstance(mask, Mask) and mask.plan is not None else None,
        block_size=mask.block_size if isinstance(mask, BlockMask) else None,
    )


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
