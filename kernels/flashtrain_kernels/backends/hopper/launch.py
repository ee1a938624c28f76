"""Launching Gluon kernels, the arguments that each takes of the mask, and tensor descriptors: how the TMA unit is told
where a tile lies in a (B, S, H, D) tensor of any strides, or in a workspace of float32.

B batch, S sequence, H heads, D head dimension. A box is (1, rows, 1, D padded to a power of two): rows past S and
columns past D read as zero and are not written.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.backends.nvidia import driver
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ... import launch_cache
from ...bounded import Bounded
from ...masks import AnyMask, Mask
from ...options import Options
from ..compiled import Address, entry_of, map_of
from ..portable import launch as portable
from ..portable.launch import Launch
from .assembly import capped_terms


def mask_arguments(mask: AnyMask | None, unused: Tensor, kernel: str) -> tuple[Any, ...]:
    """Mask.queries, the table of tiles, the list of blocks (of a Mask: Mask.keys, so that the kernels of other calls
    have no argument more); the table's strides by batch row, head and tile; the strides of Mask.queries by batch row
    and number. unused: a tensor to stand for absent ones.

    kernel: "forward", "dq" or "dkdv", whose table of the plan is passed. Of Sequences: where their keys end is the
    table, where their queries end the list, and the last number is N.
    """
    queries, plane, stride_rows, positions, _ = portable.mask_arguments(mask, unused)
    table = portable.table_of(mask, unused, kernel)
    listed = positions if isinstance(mask, Mask) else table.blocks
    return (queries, table.rows, listed, table.batch, table.head, table.row, stride_rows, plane)


def scale_of(options: Options, bounded: bool = False) -> float | tuple[float, ...]:
    """What makes a product q k the exponent of 2: a factor. With softcap what `assembly.capped` makes a tanh of it with
    (bounded: the exponent less a number that is the same for all), and at place 8 what that is multiplied by."""
    if not options.softcap:
        return options.scale * LOG2_E
    cap = options.softcap * LOG2_E
    terms = (cap, min(cap, 100 - cap)) if bounded else (1.0, 0.0)
    return (*capped_terms(options.scale / options.softcap, *terms), cap)


def why_no_softcap(options: Options) -> str | None:
    """Why the kernels have no such softcap, if so: their coefficients must be float32 numbers (assembly.capped_terms),
    and what hides a pair in the backward times the softcap (backward_parts.hide)."""
    if options.softcap and not (1e-4 < options.scale / options.softcap < 1e3 and 1e-6 < options.softcap < 1e6):
        return "a softcap beyond 1/1000 and 10000 times the scale"
    return None


LOG2_E = math.log2(math.e)

# Compiled kernels. Triton finds them itself, but looks at all the arguments for longer than a short kernel runs.
_COMPILED: dict[tuple[Any, ...], Any] = {}


def run(launch: Launch) -> None:
    """Launch, compiling where this is the first of its kind. The kernel's integers must not be specialised."""
    launch_cache.launch(launch, _run)


def _run(launch: Launch) -> Any:
    """The compiled kernel, launched."""
    kinds = tuple(
        [
            x.data_ptr() % 16 if isinstance(x, Tensor) else -(2**31) <= x < 2**31 if isinstance(x, int) else None
            for x in launch.args
        ]
    )
    described = tuple([(x.base.dtype, *x.block_shape) for x in launch.args if isinstance(x, TensorDescriptor)])
    constants = tuple(launch.constants.values())
    key = (launch.kernel, torch.cuda.current_device(), kinds, described, constants, *launch.options.items())
    compiled = _COMPILED.get(key)
    if compiled is None:
        compiled = launch.kernel[launch.grid](*launch.args, **launch.constants, **launch.options)
        _remember_maps(compiled)
        _COMPILED[key] = compiled
    else:
        compiled[(launch.grid[0], 1, 1)](*launch.args, *constants)
    return compiled


def _remember_maps(compiled: Any) -> None:
    """Let a compiled kernel encode the TMA map of a descriptor object once and not at every launch (6 us each).

    Where a release builds its launcher otherwise than is known, launches stay as they are.
    """
    entry, ordinary = entry_of(compiled), getattr(driver, "_BASE_ARGS_FORMAT_LEN", None)
    if entry is None or not entry.maps:
        return

    def expand(args: Any) -> list[Any]:
        found: list[Any] = []
        for index, arg in enumerate(args):
            if index not in entry.maps:
                found.append(arg)
                continue
            if not hasattr(arg, "encoded"):
                arg.encoded = map_of(arg, entry.maps[index])
            found.extend(arg.encoded)
        return found

    def launch_flat(*args: Any) -> Any:  # 3.6: the kernel's arguments follow the launcher's own
        return entry.launch(*args[:ordinary], *expand(args[ordinary:]))

    def launch_nested(*args: Any) -> Any:  # from 3.7 on: they come as one tuple
        return entry.launch(*args[:-1], expand(args[-1]))

    compiled.run.launch = launch_nested if ordinary is None else launch_flat


_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
_KEPT: Bounded[tuple[object, ...], TensorDescriptor] = Bounded(4096)  # each is a few hundred bytes


@cache
def layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a box lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])


def descriptor(x: Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """A descriptor of boxes of (B, S, H, D). Made once for each address, as memory is used over and over."""

    def make() -> TensorDescriptor:
        strides = [8 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
        return TensorDescriptor(
            Address(x.data_ptr(), x.dtype), list(x.shape), [*strides[:3], 1], list(box), layout(box, x.dtype)
        )

    return _kept((x.data_ptr(), x.shape, x.stride(), x.dtype, box), x, make)


def workspace(x: Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """A descriptor of boxes, in the order of memory, of a contiguous float32 tensor seen as rows as wide as the box."""

    def make() -> TensorDescriptor:
        shape = [x.numel() // math.prod(box[1:]), *box[1:]]
        strides = [math.prod(box[i + 1 :]) for i in range(len(box))]
        return TensorDescriptor(
            Address(x.data_ptr(), x.dtype), shape, strides, list(box), gl.NVMMASharedLayout(0, 32, len(box))
        )

    return _kept((x.data_ptr(), x.numel(), box), x, make)


def _kept(key: tuple[object, ...], x: Tensor, make: Callable[[], TensorDescriptor]) -> TensorDescriptor:
    recorder = launch_cache.recorder()
    if recorder is not None:  # which must tell apart two tensors at one address
        made = make()
        recorder.is_within(made, x)
        return made
    kept = _KEPT.get(key)
    if kept is None:
        kept = _KEPT[key] = make()
    return kept


def why_not(name: str, x: Tensor) -> str | None:
    """Why the TMA unit cannot read a (B, S, H, D) tensor, if so."""
    if x.dtype not in _DTYPES:
        return f"{name} is {str(x.dtype).removeprefix('torch.')}, not float16 or bfloat16"
    if x.data_ptr() % 16:
        return f"{name} does not start at a multiple of 16 bytes"
    sizes, strides = x.shape[:3], x.stride()[:3]
    if any(size > 1 and (stride % 8 or not 0 < stride < 1 << 37) for size, stride in zip(sizes, strides, strict=True)):
        return f"{name} has strides that are no multiples of 16 bytes"
    if x.stride(3) != 1:
        return f"{name} has a last stride other than 1"
    return None
