"""The one place that chooses which implementation computes a call.

    portable   the Triton kernels: NVIDIA GPUs of sm_80 and later, or Triton's
               interpreter on CPU tensors
    hopper     the Gluon kernels for sm_90 GPUs, for the calls that they support; the portable
               kernels run the others
    torch      torch's scaled_dot_product_attention: tensors that are not on a CUDA device
    reference  plain PyTorch (reference.py) behind the same operators; only when forced, for tests

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

import contextlib
import importlib.util
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from . import environment, reference
from .backends import Backend, Call, Direction, Gradients, unit_stride
from .backends.hopper import backend as hopper
from .backends.portable import backend as portable
from .backends.portable.tile_table import Tile
from .environment import INTERPRETED, forced_implementation
from .launch_cache import on_device
from .masks.mask import Mask, register_plan_blocks
from .options import Options

# Asked in this order; the last serves every call.
BACKENDS: tuple[Backend, ...] = (hopper, portable)
IMPLEMENTATIONS = (*(backend.NAME for backend in reversed(BACKENDS)), "torch", "reference")


@contextlib.contextmanager
def force(implementation: str, tile: Tile | None = None, together: bool = True) -> Iterator[None]:
    """Make every call within this context manager use one implementation, in all
    threads: for tests and tuning.

    Args:
        implementation: one of IMPLEMENTATIONS.
        tile: the tile size of every portable kernel, instead of the table's.
        together: with a tile, whether one launch computes dK/dV and dQ.

    Raises:
        ValueError: an unknown implementation.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, not {implementation!r}"
        )
    before = environment.forced
    environment.forced = environment.Forced(implementation, tile, together)
    try:
        yield
    finally:
        environment.forced = before


def implementation_for(device_type: str) -> str:
    """Return the implementation for a device type ("cuda", "cpu", ...); "portable"
    means any of BACKENDS."""
    forced = forced_implementation()
    if forced is not None and forced != "hopper":
        return forced
    return (
        "portable" if device_type == "cuda" or (device_type == "cpu" and INTERPRETED) else "torch"
    )


def by_torch(device: torch.device) -> bool:
    """Return whether torch's own attention computes calls on this device. (Not on meta tensors: the
    operators compute their shapes.)"""
    return device.type != "meta" and implementation_for(device.type) == "torch"


def runs_kernels(device: torch.device) -> bool:
    """Return whether operators run Triton kernels on this device (a CPU only in Triton's
    interpreter), else the reference. Raises ValueError if a GPU cannot run them."""
    if forced_implementation() == "reference" or (device.type == "cpu" and not INTERPRETED):
        return False
    if not torch.compiler.is_compiling():  # the compiled call asks again
        _require_triton()
        if device.type == "cuda":
            _require_sm80(torch.cuda.get_device_capability(device))
    return True


def backend_for(call: Call, direction: Direction) -> Backend:
    """Return the first backend that supports this call in this direction (forward or backward)."""
    return next(backend for backend in BACKENDS if backend.serves(call, direction) is None)


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Compute (out (B, Sq, H, D), lse (B, H, Sq)), contiguous, by kernels or by the reference."""
    if not runs_kernels(q.device):
        # Its products are in the tensors' own dtype.
        with torch.autocast(q.device.type, enabled=False):
            out, lse = reference.forward_from(q, k, v, options)
        return out.contiguous(), lse.contiguous()
    check_interpreter(q.dtype)
    call = Call(unit_stride(q), unit_stride(k), unit_stride(v), options)
    with on_device(q.device):
        return backend_for(call, "forward").forward(call)


def backward(q: Tensor, k: Tensor, v: Tensor, options: Options, given: Gradients) -> None:
    """Fill the gradient tensors in `given`, by kernels or by the reference."""
    dout, dlse, out, lse, *targets = given
    if not runs_kernels(q.device):
        with torch.autocast(q.device.type, enabled=False):
            computed = reference.backward_from(
                dout, dlse, q, k, v, out, lse, options, given.dbias is not None
            )
        for target, gradient in zip(targets, computed, strict=True):
            if target is not None and gradient is not None:
                target.copy_(gradient)
        return
    call = Call(unit_stride(q), unit_stride(k), unit_stride(v), options)
    dlse = None if dlse is None else dlse.contiguous()
    given = given._replace(
        dout=unit_stride(dout), dlse=dlse, out=unit_stride(out), lse=lse.contiguous()
    )
    with on_device(q.device):
        backend_for(call, "backward").backward(call, given)


def check_interpreter(dtype: torch.dtype) -> None:
    """Raise ValueError for a dtype that Triton's interpreter, where it runs the
    kernels, computes wrongly."""
    if INTERPRETED and dtype == torch.bfloat16:
        raise ValueError(
            "Triton's interpreter multiplies bfloat16 wrongly: "
            "use float16 or float32 with TRITON_INTERPRET=1"
        )


def plan_blocks(
    mask: Mask, head_dim: int, dtype: torch.dtype, rich: bool, softcap: bool
) -> tuple[int, ...] | None:
    """Return the tile sizes for `Mask.planned`, from the first backend that has any; None if no
    kernel runs, or if the kernels need only the boundaries of the mask's packed sequences. rich:
    with ALiBi, a bias or dropout."""
    device = mask.queries.device
    if not runs_kernels(device):
        return None
    if mask.sequences is not None and hopper.finds_sequences(device, head_dim, dtype, rich):
        return None
    for backend in BACKENDS:
        blocks = backend.plan_blocks(mask, head_dim, dtype, rich, softcap)
        if blocks is not None:
            return blocks
    return None


register_plan_blocks(plan_blocks)


def finds_sequences(
    device: torch.device, head_dim: int, dtype: torch.dtype, options: Options
) -> bool:
    """Return whether a call's kernels, forward and backward, read packed sequences from
    cu_seqlens, without a Mask."""
    if implementation_for(device.type) != "portable" or not runs_kernels(device):
        return False
    changed = options.beyond_softcap and not hopper.changes_sequences(options, head_dim)
    return hopper.finds_sequences(device, head_dim, dtype, changed)


@cache
def _require_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            "flashtrain_kernels needs the package triton for tensors on a CUDA device: install it, "
            "or use torch.nn.functional.scaled_dot_product_attention"
        )


@cache
def _require_sm80(capability: tuple[int, int]) -> None:
    if capability < (8, 0):
        raise ValueError(
            "flashtrain_kernels needs a GPU of compute capability 8.0 (sm_80) or later, this one "
            f"has {capability[0]}.{capability[1]}: use "
            "torch.nn.functional.scaled_dot_product_attention"
        )
