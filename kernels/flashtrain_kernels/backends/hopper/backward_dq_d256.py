"""dQ at D = 256, by a kernel of its own: a program holds 128 queries of a head and visits
the keys that they see.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension (256,
padded). A tile is 64 keys; each of two consumer warpgroups has 64 queries; tiles of
scores are (queries, keys).
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..portable.tiles import Bounds
from ..portable.traversal import in_band
from .assembly import capped, exp2_few, opaque, packed, unpacked
from .backward_parts import (
    RING,
    await_release,
    gradient_scale,
    has_nan,
    hide_outside,
    release,
    store_keys,
)
from .backward_schedule import BLOCK_Q
from .triton_compat import load_tile

D = gl.constexpr(256)
KEYS = gl.constexpr(64)  # a tile's
ROWS = gl.constexpr(128)  # queries of a program
# The hardware barrier of V's buffer; K's two have RING and the next.
VALUES = gl.constexpr(RING.value + 2)


# The arguments that are the same for all programs; their meaning: see dq_kernel.
Call = namedtuple(
    "Call", "scale_log2 heads bounds tiles row_tiles all_heads heads_together rows dq flags strides"
)


@gluon.jit
def _work(program, call, C: gl.constexpr):
    """Return, for a program: batch row, query head, first query, the tiles of keys [first, past)
    that its queries see, and those tiles [begin, past) of them that need no mask. Of each
    `heads_together` heads the last queries come first, which see most below a causal mask."""
    group = program // (call.heads_together * call.tiles)
    place = program % (call.heads_together * call.tiles)
    together = gl.minimum(call.heads_together, call.all_heads - group * call.heads_together)
    head_index = group * call.heads_together + place % together
    first = (call.tiles - 1 - place // together) * ROWS
    bounds = call.bounds
    end = gl.minimum(first + ROWS, bounds.seqlen_q)
    seen = in_band(first, end, bounds.seqlen_k, bounds.left, bounds.right, C.left, C.right, KEYS)
    # In a band all tiles follow one another: masked, full, masked ones.
    past = seen.p0 + seen.masked + seen.full
    return (
        head_index // call.heads,
        head_index % call.heads,
        first,
        seen.p0,
        past,
        seen.f0,
        seen.f0 + seen.full,
    )


@gluon.jit
def _produce(descs, memory, call, C: gl.constexpr):
    q_desc, k_desc, v_desc, do_desc = descs
    q_smem, do_smem, k_ring, v_smem, own_full, k_full, v_full = memory
    batch, head, first, begin, past, _full_begin, _full_past = _work(gl.program_id(0), call, C)
    kv_head = head // C.group
    mbarrier.expect(own_full, 2 * ROWS * D * 2)
    for w in gl.static_range(2):
        load_tile(do_desc, [batch, first + w * BLOCK_Q, head, 0], own_full, do_smem.index(w))
        load_tile(q_desc, [batch, first + w * BLOCK_Q, head, 0], own_full, q_smem.index(w))
    for j in range(past - begin):
        key = (begin + j) * KEYS
        await_release(VALUES, j >= 1)
        mbarrier.expect(v_full, KEYS * D * 2)
        load_tile(v_desc, [batch, key, kv_head, 0], v_full, v_smem.index(0))
        slot = j & 1
        await_release(RING + slot, j >= 2)
        mbarrier.expect(k_full.index(slot), KEYS * D * 2)
        load_tile(k_desc, [batch, key, kv_head, 0], k_full.index(slot), k_ring.index(slot))


@gluon.jit
def _products(memory, j, zero, W: gl.constexpr):
    """Issue dP = dO V^T and S = Q K^T of the tile visited at step j."""
    q_smem, do_smem, k_ring, v_smem, _own_full, k_full, v_full = memory
    never = j >> 30  # computed at run time, or the compiler holds dozens of addresses in registers
    slot = j & 1
    mbarrier.wait(v_full, slot)
    v = v_smem.index(never).reshape([KEYS, D])
    do = do_smem.index(never + W).reshape([BLOCK_Q, D])
    dp = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(k_full.index(slot), (j >> 1) & 1)
    k = k_ring.index(slot).reshape([KEYS, D])
    q = q_smem.index(never + W).reshape([BLOCK_Q, D])
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    return dp, s


@gluon.jit
def _gradients(
    s,
    dp,
    lse2,
    delta,
    tile,
    first,
    full_begin,
    full_past,
    call,
    dtype: gl.constexpr,
    C: gl.constexpr,
):
    """Return dS in dtype, two neighboring keys packed into an int32, from s = Q K^T and dp = dO V^T
    of tile number `tile` of keys. lse2, delta: the queries' statistics; first: index of the first
    query; full_begin, full_past: tiles from and up to which no mask is needed."""
    LAYOUT: gl.constexpr = s.type.layout
    if C.softcap:
        x = capped(s, call.scale_log2)
    else:
        x = s * call.scale_log2 - lse2[:, None]
    if (tile < full_begin) | (tile >= full_past):
        key = opaque(tile * KEYS) + gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        query = opaque(first) + gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(1, LAYOUT))[:, None]
        x = hide_outside(x, query, key, call.bounds, C)
    if C.softcap:
        p = exp2_few(x * call.scale_log2[8] - lse2[:, None])
        p = p - p * (x * x)
    else:
        p = exp2_few(x)
    return packed(p * (dp - delta[:, None]), dtype)


@gluon.jit
def _consume(memory, call, W: gl.constexpr, C: gl.constexpr):
    """Run consumer warpgroup W: compute dQ of its 64 queries. The product for dQ of a tile runs
    during the next tile's exponentials."""
    q_smem, _do_smem, k_ring, _v_smem, own_full, _k_full, _v_full = memory
    batch, head, first, begin, past, full_begin, full_past = _work(gl.program_id(0), call, C)
    dtype: gl.constexpr = q_smem.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    mma_d: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma_d, 2)
    zero = gl.zeros([BLOCK_Q, KEYS], gl.float32, mma)
    dq = gl.zeros([BLOCK_Q, D], gl.float32, mma_d)
    number = gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(1, mma))
    # Statistics come in whole tiles of 64 queries: where this one is past the end,
    # any other's will do.
    place = (batch * call.heads + head) * call.row_tiles + gl.minimum(
        first // BLOCK_Q + W, call.row_tiles - 1
    )
    rows = call.rows + place.to(gl.int64) * (2 * BLOCK_Q)
    lse2 = gl.load(rows + number)
    delta = gl.load(rows + BLOCK_Q + number)
    own = first + W * BLOCK_Q
    count = past - begin
    mbarrier.wait(own_full, 0)
    if count > 0:
        dp, s = _products(memory, gl.to_tensor(0), zero, W)
        dp, s = warpgroup_mma_wait(0, deps=[dp, s])
        release(VALUES, count > 1)
        ds = _gradients(s, dp, lse2, delta, begin, own, full_begin, full_past, call, dtype, C)
        for j in range(1, count):
            before = (j & 1) ^ 1
            dp, s = _products(memory, j, zero, W)
            k = k_ring.index(before).reshape([KEYS, D])
            dq = warpgroup_mma(gl.convert_layout(unpacked(ds, dtype), left), k, dq, is_async=True)
            dp = warpgroup_mma_wait(2, deps=[dp])
            release(VALUES, j + 1 < count)
            s = warpgroup_mma_wait(1, deps=[s])
            following = _gradients(
                s, dp, lse2, delta, begin + j, own, full_begin, full_past, call, dtype, C
            )
            # Never; but the compiler would move the wait below to before the exponentials.
            if call.bounds.seqlen_q < 0:
                mbarrier.wait(own_full, 0)
            dq = warpgroup_mma_wait(0, deps=[dq])
            release(RING + before, j + 1 < count)
            ds = following
        k = k_ring.index((count - 1) & 1).reshape([KEYS, D])
        dq = warpgroup_mma(gl.convert_layout(unpacked(ds, dtype), left), k, dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
    # Again: the loop has no registers left.
    batch, head, first, _, _, _, _ = _work(opaque(gl.program_id(0)), call, C)
    rows_left = call.bounds.seqlen_q - first
    if C.left or C.right:
        nan = has_nan(dq, dq)
        if (nan > 0) & (rows_left > W * BLOCK_Q):
            gl.store(
                call.flags + (batch * call.heads + head) * call.row_tiles + first // BLOCK_Q + W,
                nan,
            )
    stride_b, stride_s, stride_h = call.strides
    UNIT: gl.constexpr = 8 if C.aligned else 1
    base = call.dq + batch.to(gl.int64) * stride_b + head.to(gl.int64) * stride_h
    base += first.to(gl.int64) * (stride_s * UNIT)
    if C.aligned:
        base = gl.multiple_of(base, 16)
    store_keys(
        base,
        stride_s * UNIT,
        dq * gradient_scale(call, C),
        rows_left,
        q_smem.index(W),
        W,
        D,
        C.head_dim,
    )


@gluon.jit(
    do_not_specialize=[
        "flags_before", "stride_dqb", "stride_dqs", "stride_dqh", "heads", "seqlen_q", "seqlen_k",
        "band_left",
        "band_right", "tiles", "row_tiles", "all_heads", "heads_together",
    ]
)  # fmt: skip
def dq_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_ptr, dq_ptr, flags_ptr, flags_before, stride_dqb,
    stride_dqs, stride_dqh,
    scale_log2, heads, seqlen_q, seqlen_k, band_left, band_right, tiles, row_tiles, all_heads,
    heads_together,
    C: gl.constexpr,
):  # fmt: skip
    """Compute dQ, and store it scaled in its dtype.

    Args:
        q_desc, k_desc, v_desc, do_desc: TMA descriptors of q, k, v and dout, for 64 rows.
        rows_ptr: (B H row_tiles 128,) float32: see backward_kernel. scale_log2:
            from softcap.scale_of.
        dq_ptr: (B, Sq, H, D). stride_dqs: divided by 8 if C.aligned.
        flags_ptr: (flags_before + B H row_tiles,) int32: whether 64 queries got a NaN,
            if pairs may be masked.
        tiles, row_tiles: a head's tiles of 128 and of 64 queries. all_heads: B H.
        heads_together: in how many heads' programs the last queries come first.
    """
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2, 1, BLOCK_Q, 1, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [2, 1, BLOCK_Q, 1, D], do_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [2, 1, KEYS, 1, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [1, 1, KEYS, 1, D], v_desc.layout)
    # mbarriers, not in one buffer, or the compiler puts barriers of its own between their uses.
    own_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(own_full, count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(k_full.index(0), count=1)
    mbarrier.init(k_full.index(1), count=1)
    hopper.fence_async_shared()
    memory = (q_smem, do_smem, k_ring, v_smem, own_full, k_full, v_full)
    call = Call(
        scale_log2, heads, Bounds(seqlen_q, seqlen_k, band_left, band_right), tiles, row_tiles,
        all_heads,
        heads_together, rows_ptr, dq_ptr, flags_ptr + flags_before,
        (stride_dqb, stride_dqs, stride_dqh),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (memory, call, 0, C)),
            (_consume, (memory, call, 1, C)),
            (_produce, ((q_desc, k_desc, v_desc, do_desc), memory, call, C)),
        ],
        [4, 1],
        [240, 24],
    )
