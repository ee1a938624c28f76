"""Which implementation a call gets: the one place that chooses, by readable rules.

    portable    the Triton kernels: NVIDIA GPUs of sm_80 and later, or Triton's interpreter on CPU tensors
    hopper      the Gluon kernels, for the calls on sm_90 GPUs that they serve; the rest of these are portable
    torch       torch's scaled_dot_product_attention: tensors that are not on a CUDA device
    reference   plain PyTorch (reference.py) behind the same operators; only when forced, for tests

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

import contextlib
import importlib.util
from collections.abc import Iterator
from functools import cache

import torch

from . import environment
from .backends import Backend
from .backends.hopper import backend as hopper
from .backends.portable import backend as portable
from .backends.portable.tile_table import Tile
from .environment import INTERPRETED, forced_implementation
from .masks.mask import Mask, register_plan_blocks
from .options import Options

# Asked in this order; the last serves every call.
BACKENDS: tuple[Backend, ...] = (hopper, portable)
IMPLEMENTATIONS = (*(backend.NAME for backend in reversed(BACKENDS)), "torch", "reference")


@contextlib.contextmanager
def force(implementation: str, tile: Tile | None = None, together: bool = True) -> Iterator[None]:
    """Let every call within the context use this implementation: for tests and tuning.

    It applies to the whole process, so also to the threads that run autograd.

    Args:
        implementation: one of IMPLEMENTATIONS.
        tile: for every kernel, instead of the table's.
        together: with a tile, whether dK/dV and dQ share a launch.

    Raises:
        ValueError: an unknown implementation.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, not {implementation!r}")
    before = environment.forced
    environment.forced = environment.Forced(implementation, tile, together)
    try:
        yield
    finally:
        environment.forced = before


def implementation_for(device_type: str) -> str:
    """The implementation for tensors of a device type ("cuda", "cpu", ...): "portable" stands for our kernels, of which
    BACKENDS are asked for each call."""
    forced = forced_implementation()
    if forced is not None and forced != "hopper":
        return forced
    return "portable" if device_type == "cuda" or (device_type == "cpu" and INTERPRETED) else "torch"


def runs_kernels(device: torch.device) -> bool:
    """Do the operators run Triton kernels on this device (else the reference)? Raises ValueError where they cannot.

    A CPU has no way to run them but the interpreter, so operators called there directly compute by the reference.
    """
    if forced_implementation() == "reference" or (device.type == "cpu" and not INTERPRETED):
        return False
    if not torch.compiler.is_compiling():  # the compiled call asks again
        _require_triton()
        if device.type == "cuda":
            _require_sm80(torch.cuda.get_device_capability(device))
    return True


def plan_blocks(mask: Mask, head_dim: int, dtype: torch.dtype, rich: bool, softcap: bool) -> tuple[int, ...] | None:
    """The tile sizes that `Mask.planned` plans for: the first backend's that has some; None where no kernels run, or
    where they will find the mask's sequences by themselves."""
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


def finds_sequences(device: torch.device, head_dim: int, dtype: torch.dtype, options: Options) -> bool:
    """Do packed sequences stay as they are in this call, as its kernels find them themselves? Else a Mask is made."""
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
            f"flashtrain_kernels needs a GPU of compute capability 8.0 (sm_80) or later, this one has "
            f"{capability[0]}.{capability[1]}: use torch.nn.functional.scaled_dot_product_attention"
        )
