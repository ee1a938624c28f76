"""Tensor descriptors: how the TMA unit is told where a tile lies in a (B, S, H, D) tensor of any strides, or in a
workspace of float32.

B batch, S sequence, H heads, D head dimension. A box is (1, rows, 1, D padded to a power of two): rows past S and
columns past D read as zero and are not written.
"""

import math
from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
_KEPT: dict[tuple[object, ...], TensorDescriptor] = {}
_MOST = 4096  # descriptors kept; each is a few hundred bytes


class _Address:
    """All that a descriptor needs of its tensor, so that keeping the one does not keep the other's memory."""

    def __init__(self, x: Tensor) -> None:
        self.dtype, self.address = x.dtype, x.data_ptr()

    def data_ptr(self) -> int:
        return self.address


@cache
def layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a box lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])


def descriptor(x: Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """A descriptor of boxes of (B, S, H, D). Made once for each address, as memory is used over and over."""
    key = (x.data_ptr(), x.shape, x.stride(), x.dtype, box)
    kept = _KEPT.get(key)
    if kept is None:
        strides = [8 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
        made = TensorDescriptor(_Address(x), list(x.shape), [*strides[:3], 1], list(box), layout(box, x.dtype))
        kept = _keep(key, made)
    return kept


def workspace(x: Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """A descriptor of boxes, in the order of memory, of a contiguous float32 tensor seen as rows as wide as the box."""
    key = (x.data_ptr(), x.numel(), box)
    kept = _KEPT.get(key)
    if kept is None:
        shape = [x.numel() // math.prod(box[1:]), *box[1:]]
        strides = [math.prod(box[i + 1 :]) for i in range(len(box))]
        plain = gl.NVMMASharedLayout(0, 32, len(box))
        kept = _keep(key, TensorDescriptor(_Address(x), shape, strides, list(box), plain))
    return kept


def _keep(key: tuple[object, ...], made: TensorDescriptor) -> TensorDescriptor:
    if len(_KEPT) >= _MOST:
        _KEPT.clear()
    _KEPT[key] = made
    return made


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
