"""The differences between the Triton releases (3.6 to 3.9) for whose Gluon the
kernels are written."""

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

from ... import environment
from ...environment import release
from .tiles import ForwardTile

# The copy engine's functions: 3.8 renames them, and 3.9 has the old names only to say so.
if release() >= (3, 8):
    load_tile, store_tile = tma.async_load, tma.async_store
else:
    load_tile, store_tile = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

# Columns of the output that are recomputed together after a NaN: with more, 3.8 and 3.9 take the
# fast loop's registers.
AGAIN = gl.constexpr({(3, 8): 32, (3, 9): 64}.get(release(), 128))


def forward_tile(tile: ForwardTile) -> ForwardTile:
    """Return a tile's settings for the Triton installed: 3.8 and 3.9 get more registers
    (compiled there, not timed)."""
    if environment.release() < (3, 8):
        return tile
    if tile.consumers == 3:
        tile = tile._replace(consumers=2, registers=240, stages=min(tile.stages, 3))
    return tile._replace(tight=False, cap=max(tile.cap, 104) if tile.cap else 0)


def backward_options(head_dim: int, intervals: int) -> dict[str, Any]:
    """Return compile options of the fused backward kernel. intervals: key ranges a query
    of a Mask sees, 0 to 2."""
    # 3.9 would spill registers in the loop, unless LLVM orders it so as to save them; earlier
    # releases have no such option. At D = 64 that is so with masks of intervals only, and the
    # others spill less without.
    saves = environment.release() >= (3, 9) and (head_dim > 64 or intervals > 0)
    return {"num_warps": 4, "sched4reg": True} if saves else {"num_warps": 4}


@builtin
def reinterpreted(buffer, dtype, shape, layout, _semantic=None):
    """View a shared-memory buffer as a tile of another dtype, shape and layout; Gluon has
    this publicly from 3.9 on."""
    method = buffer.reinterpret if hasattr(buffer, "reinterpret") else buffer._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)
