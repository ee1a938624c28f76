"""TMA descriptors: where tiles lie in a (B, S, H, D) tensor of any strides, or in a workspace.

B batch, S sequence, H heads, D head dimension. A box is (1, rows, 1, D padded to a power of two):
rows past S and columns past D read as zero and are not written.
"""

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ... import launch_cache
from ...launch_cache import Bounded
from ..compiled import Address

_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
_KEPT: Bounded[tuple[object, ...], TensorDescriptor] = Bounded(4096)  # each is a few hundred bytes


@cache
def layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Return the layout in shared memory of a box of this shape and dtype."""
    return gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])


def descriptor(x: Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """Return a TMA descriptor for boxes of x (B, S, H, D), from a cache by address,
    as torch reuses memory."""

    def make() -> TensorDescriptor:
        strides = [
            8 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)
        ]
        return TensorDescriptor(
            Address(x.data_ptr(), x.dtype),
            list(x.shape),
            [*strides[:3], 1],
            list(box),
            layout(box, x.dtype),
        )

    return _kept((x.data_ptr(), x.shape, x.stride(), x.dtype, box), x, make)


def workspace(x: Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """Return a TMA descriptor for consecutive boxes of a contiguous float32 tensor, seen as
    rows as wide as the box."""

    def make() -> TensorDescriptor:
        shape = [x.numel() // math.prod(box[1:]), *box[1:]]
        strides = [math.prod(box[i + 1 :]) for i in range(len(box))]
        return TensorDescriptor(
            Address(x.data_ptr(), x.dtype),
            shape,
            strides,
            list(box),
            gl.NVMMASharedLayout(0, 32, len(box)),
        )

    return _kept((x.data_ptr(), x.numel(), box), x, make)


def _kept(
    key: tuple[object, ...], x: Tensor, make: Callable[[], TensorDescriptor]
) -> TensorDescriptor:
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
    """Return None if the TMA unit can read x (B, S, H, D), called `name` in messages,
    else the reason why not."""
    if x.dtype not in _DTYPES:
        return f"{name} is {str(x.dtype).removeprefix('torch.')}, not float16 or bfloat16"
    if x.data_ptr() % 16:
        return f"{name} does not start at a multiple of 16 bytes"
    sizes, strides = x.shape[:3], x.stride()[:3]
    if any(
        size > 1 and (stride % 8 or not 0 < stride < 1 << 37)
        for size, stride in zip(sizes, strides, strict=True)
    ):
        return f"{name} has strides that are no multiples of 16 bytes"
    if x.stride(3) != 1:
        return f"{name} has a last stride other than 1"
    return None
