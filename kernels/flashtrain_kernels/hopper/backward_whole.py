"""dQ where a program has whole heads: short sequences, each query of which sees the head's first keys.

A program's workspace is its own and serves one head after the other, so it stays in the second-level cache. The first
tile of keys stores, the next ones add, and the last one that sees a tile of queries adds what is there and stores dQ
itself: every number is one thread's all the time, so nothing must be waited for, and the sum is the same every time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .assembly import opaque
from .backward_parts import HALF, add_directly, in_register_order
from .backward_walk import BLOCK_K, BLOCK_Q, noted


@gluon.jit
def settle(
    dq, target, tile_here, first_key, head_place, call, notes, staging, WG: gl.constexpr, D: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Store, add or finish a warpgroup's half of a tile of dQ^T: 64 dimensions of 32 queries at D = 64, else of 64.

    tile_here: a head's number in the group times the tiles of a head, plus the tile.
    """
    scale_log2, heads, bounds, query_tiles, key_tiles, all_heads, _heads_together, _pointers, results = call
    PART: gl.constexpr = D // 2
    place = (gl.program_id(0) * (C.group * query_tiles) + tile_here).to(gl.int64)
    pointer = target + place * (BLOCK_Q * D) + WG * (HALF * PART)
    tile = tile_here
    head_index = head_place
    if C.group > 1:
        tile = tile_here % query_tiles
        head_index += tile_here // query_tiles
    last = first_key // BLOCK_K == key_tiles - 1
    if C.right:
        last = last | ((tile + 1) * BLOCK_Q <= first_key + BLOCK_K - bounds[3])
    flat = in_register_order(dq, PART)
    own = gl.arange(0, HALF * PART, layout=flat.type.layout)
    if C.whole == 2:
        if first_key == 0:
            gl.store(pointer + own, flat)
        else:
            add_directly(pointer, dq, first_key > 0, PART)
    elif last:
        before = gl.load(pointer + own, mask=(own >= 0) & (first_key > 0), other=0.0, cache_modifier=".cg")
        total = (flat + before) * (scale_log2 * 0.6931471805599453)
        if C.right:
            flag = results[2] + 2 * key_tiles * all_heads + head_index * query_tiles + tile
            gl.store(flag + own * 0, gl.full([HALF * PART], 1, gl.int32, layout=flat.type.layout), mask=total != total)
        _store_queries(total, tile, head_index, heads, bounds, notes, results[3], staging, WG, D, C)
    elif first_key == 0:
        gl.store(pointer + own, flat)
    else:
        add_directly(pointer, dq, first_key > 0, PART)


@gluon.jit
def _store_queries(
    flat, tile, head_index, heads, bounds, notes, dq_ptr, staging, WG: gl.constexpr, D: gl.constexpr, C: gl.constexpr
):
    """Half a tile of dQ, given as `in_register_order` has it. staging: at D = 128 shared memory to go through."""
    PART: gl.constexpr = D // 2
    DTYPE: gl.constexpr = dq_ptr.dtype.element_ty
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    turned = flat.reshape([4, PART // 8, 8, 4, 2, 2]).permute((1, 3, 5, 0, 4, 2)).reshape([PART, HALF])
    row = opaque(tile * BLOCK_Q) + gl.arange(0, PART, layout=gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))[None, :]
    if D == 64:
        value = gl.convert_layout(turned.to(DTYPE), layout)
        row += WG * PART
    else:
        place = staging._reinterpret(DTYPE, [2 * PART, HALF], gl.NVMMASharedLayout(128, 16, 2)).slice(0, PART)
        place.store(turned.to(DTYPE))
        value = place.load(layout)
        column += WG * HALF
    unit = 8 if C.aligned else 1
    base = dq_ptr + (head_index // heads) * (noted(notes, 12) * unit) + (head_index % heads) * (noted(notes, 14) * unit)
    gl.store(base + row.to(gl.int64) * (noted(notes, 13) * unit) + column, value, mask=row < bounds[0])


@gluon.jit
def finish_queries(
    first_key, head_place, target, call, notes, staging, WG: gl.constexpr, D: gl.constexpr, C: gl.constexpr
):
    """Store dQ of the tiles that no later tile of keys sees; only this warpgroup's half of each."""
    scale_log2, heads, bounds, query_tiles, key_tiles, all_heads, _heads_together, _pointers, results = call
    PART: gl.constexpr = D // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    begin = 0
    end = query_tiles
    if first_key // BLOCK_K < key_tiles - 1:
        end = 0
        if C.right:
            end = gl.minimum(gl.maximum(first_key + BLOCK_K - bounds[3], 0) // BLOCK_Q, query_tiles)
    if C.right:
        begin = gl.maximum(first_key - bounds[3], 0) // BLOCK_Q
    flat_layout: gl.constexpr = in_register_order(gl.zeros([HALF, PART], gl.float32, layout), PART).type.layout
    own = gl.arange(0, HALF * PART, layout=flat_layout)
    for member in range(C.group):
        for tile in range(begin, end):
            # Opaque, so that nothing of it is computed ahead of the loops that need the registers.
            place = opaque((gl.program_id(0) * C.group + member) * query_tiles + tile).to(gl.int64)
            total = gl.load(target + place * (BLOCK_Q * D) + WG * (HALF * PART) + own, cache_modifier=".cg")
            total = total * (scale_log2 * 0.6931471805599453)
            if C.right:
                flag = results[2] + 2 * key_tiles * all_heads + (head_place + member) * query_tiles + tile
                gl.store(flag + own * 0, gl.full([HALF * PART], 1, gl.int32, layout=flat_layout), mask=total != total)
            _store_queries(total, tile, head_place + member, heads, bounds, notes, results[3], staging, WG, D, C)
