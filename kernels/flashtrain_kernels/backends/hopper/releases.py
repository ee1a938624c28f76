"""What differs between the releases of Triton whose Gluon the kernels are written for, in one place."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

from ...environment import release

# The copy engine's functions: 3.8 renames them, and 3.9 has the old names only to say so.
if release() >= (3, 8):
    load_tile, store_tile = tma.async_load, tma.async_store
else:
    load_tile, store_tile = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

# Columns of the output that a forward pass holds while it computes again because of a NaN: with more, 3.8 takes
# registers from the fast loop.
AGAIN = gl.constexpr(32 if release() == (3, 8) else 128)


@builtin
def reinterpreted(buffer, dtype, shape, layout, _semantic=None):
    """The same shared memory as another kind of tile; of the public name from 3.9 on."""
    method = buffer.reinterpret if hasattr(buffer, "reinterpret") else buffer._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)
