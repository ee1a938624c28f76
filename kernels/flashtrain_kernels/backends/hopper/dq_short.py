"""dQ in the fused backward kernel where a program takes all keys of a head:
short sequences at D = 64."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .assembly import note, noted, opaque
from .backward_parts import HALF, add_directly, gradient_scale, in_register_order, threshold_of
from .backward_schedule import BLOCK_K, BLOCK_Q
from .dropout_rng import keep_scale

D = gl.constexpr(64)
PART = gl.constexpr(32)  # queries of a tile whose dQ^T a warpgroup computes
# Where `note_whole` puts what; `settle` takes most of it from there, since
# registers are for the tiles.
STRIDES = gl.constexpr(12)
HEADS = gl.constexpr(15)
SEQLEN = gl.constexpr(16)
KEY_TILES = gl.constexpr(17)
FLAGS = gl.constexpr(18)
TARGET = gl.constexpr(19)
NOTES = gl.constexpr(20)


@gluon.jit
def note_whole(notes, dq_ptr, strides, heads, seqlen_q, key_tiles, flags_ptr, C: gl.constexpr):
    """Write into shared memory `notes` what `settle` reads: dQ's address and strides,
    the numbers of heads, queries and key tiles, and the address of the flags, an int32
    for each tile of queries."""
    UNIT: gl.constexpr = 8 if C.aligned else 1
    note(notes, STRIDES, (strides[0] // UNIT, strides[1] // UNIT, strides[2] // UNIT))
    note(notes, HEADS, (heads, seqlen_q, key_tiles, flags_ptr, dq_ptr))


@gluon.jit
def settle(dq, target, tile, first_key, head_place, call, notes, WG: gl.constexpr, C: gl.constexpr):
    """Add dq, one block of keys' part of half a tile of dQ^T (64 dimensions, 32 queries), to the
    workspace `target`. For the last block, store the sum in dQ instead, and flag the tile if a NaN
    in it may come from a masked pair."""
    # Every number is one thread's all the time: nothing must be set to 0 or waited for, and the
    # sum is the same every time. The workspace serves one head after the other, so it stays in
    # the second-level cache.
    place = (gl.program_id(0) * call.query_tiles + tile).to(gl.int64)
    pointer = target + place * (BLOCK_Q * D) + WG * (HALF * PART)
    last = first_key // BLOCK_K == noted(notes, KEY_TILES).to(gl.int32) - 1
    if C.right:
        last = last | ((tile + 1) * BLOCK_Q <= first_key + BLOCK_K - call.bounds.right)
    flat = in_register_order(dq, PART)
    own = gl.arange(0, HALF * PART, layout=flat.type.layout)
    if last:
        before = gl.load(
            pointer + own, mask=(own >= 0) & (first_key > 0), other=0.0, cache_modifier=".cg"
        )
        total = (flat + before) * gradient_scale(call, C)
        if C.dropout:
            total = total * keep_scale(threshold_of(notes))
        if C.right:
            # Over the dimensions that lie in registers: each thread looks at its own numbers.
            nan = gl.where(total != total, 1, 0).reshape([4, PART // 8, 8, 4, 2, 2])
            nan = gl.max(gl.max(gl.max(nan, 5), 4), 1)
            flag = noted(notes, FLAGS).to(gl.pointer_type(gl.int32)) + (
                head_place * call.query_tiles + tile
            )
            gl.store(flag + nan * 0, nan, mask=nan > 0)
        _store_queries(total, tile, head_place, notes, call.dk.dtype.element_ty, WG, C)
    elif first_key == 0:
        gl.store(pointer + own, flat)
    else:
        add_directly(pointer, dq, first_key > 0, PART)


@gluon.jit
def _store_queries(
    flat, tile, head_place, notes, DTYPE: gl.constexpr, WG: gl.constexpr, C: gl.constexpr
):
    """Store half a tile of dQ, flattened by `in_register_order`, to dQ in global memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    value = flat.reshape([4, PART // 8, 8, 4, 2, 2]).permute((1, 3, 5, 0, 4, 2)).reshape([PART, D])
    value = gl.convert_layout(value.to(DTYPE), layout)
    row = (
        opaque(tile * BLOCK_Q)
        + WG * PART
        + gl.arange(0, PART, layout=gl.SliceLayout(1, layout))[:, None]
    )
    column = gl.arange(0, D, layout=gl.SliceLayout(0, layout))[None, :]
    UNIT: gl.constexpr = 8 if C.aligned else 1
    heads = noted(notes, HEADS).to(gl.int32)
    place = (head_place // heads) * noted(notes, STRIDES) + (head_place % heads) * noted(
        notes, STRIDES + 2
    )
    pointer = noted(notes, TARGET).to(gl.pointer_type(DTYPE)) + place * UNIT
    if C.aligned:
        pointer = gl.multiple_of(pointer, 16)  # else each number is stored by itself
    rows = row.to(gl.int64) * (noted(notes, STRIDES + 1) * UNIT)
    gl.store(pointer + rows + column, value, mask=row < noted(notes, SEQLEN).to(gl.int32))
