"""The two consumer warpgroups of the fused backward kernel at D = 256, which do different work.

D head dimension (256). A tile is 64 queries, a block of keys 64 keys of a head; tiles of scores are (keys, queries).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .assembly import note, noted, opaque, packed, unpacked
from .backward_parts import (
    BETWEEN,
    HALF,
    RING,
    add_directly,
    await_signal,
    barrier_if,
    exponent,
    gradient_scale,
    hide,
    in_register_order,
    meet,
    noted_stride,
    release,
    shared_stored,
    signal,
    store_keys,
    weights_of,
)
from .backward_schedule import BLOCK_Q, first_step, next_step, tile_of, work_of

D = gl.constexpr(256)
QUARTER = gl.constexpr(64)  # dimensions of dQ^T that are computed at a time
# Named barriers between the warpgroups: P^T is there, P^T was read, dS^T is there (one for each of its two slots).
WEIGHTS = gl.constexpr(BETWEEN.value)
TAKEN = gl.constexpr(BETWEEN.value + 1)
GRADIENT = gl.constexpr(BETWEEN.value + 2)
NAN = gl.constexpr(6)  # the place in `notes` where the first warpgroup says whether dV has a NaN


@gluon.jit
def _keys(x, never):
    """All keys of K or V as a left operand. never: see left_keys."""
    return x.index(never).reshape([HALF, D])


@gluon.jit
def _quarter(x, never, NUMBER: gl.constexpr):
    """Some dimensions of K^T as a left operand: (64 dimensions, 64 keys)."""
    return x.index(never).reshape([HALF, D]).slice(NUMBER * QUARTER, QUARTER, dim=1).permute((1, 0))


@gluon.jit
def _out_of_register_order(flat, LAYOUT: gl.constexpr):
    """The inverse of in_register_order, for 64 queries."""
    tile = flat.reshape([4, 8, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5)).reshape([HALF, BLOCK_Q])
    return gl.convert_layout(tile, LAYOUT, assert_trivial=True)


@gluon.jit
def _has_nan(x):
    return gl.max(gl.max(gl.where(x != x, 1, 0), 1), 0)


@gluon.jit
def score_consumer(memory, bars, call, C: gl.constexpr):
    """Compute P^T and dV of 64 keys, and half of dQ^T's dimensions one tile later (the first warpgroup, D = 256)."""
    k_smem, _v_smem, q_ring, do_ring, row_ring, ds_smem, p_smem, target, notes = memory
    kv_full, q_full, do_full = bars
    walk, masks, first_key, head_place = work_of(gl.program_id(0), call, notes, C)
    dtype: gl.constexpr = k_smem.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    mma_d: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma_d, 2)
    zero_s = gl.zeros([HALF, BLOCK_Q], gl.float32, mma)
    dv = gl.zeros([HALF, D], gl.float32, mma_d)

    mbarrier.wait(kv_full.index(0), 0)
    key = first_key + gl.arange(0, HALF, layout=gl.SliceLayout(1, mma))[:, None]
    count, member, tiles = first_step(walk, C)
    if count > 0:
        i = 0
        before = (head_place * call.query_tiles).to(gl.int64) * (BLOCK_Q * D)
        mbarrier.wait(q_full.index(0), 0)
        q = q_ring.index(0).reshape([BLOCK_Q, D])
        s = warpgroup_mma(_keys(k_smem, 0), q.permute((1, 0)), zero_s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        for j in range(count):
            never = j >> 30
            slot = j & 1
            tile, masked = tile_of(i, member, walk, C)
            s = exponent(s, row_ring.index(slot), call, C)
            if masked:
                s = hide(s, tile, key, key, walk.bounds, masks, C, mma)
            p, slope = weights_of(s, row_ring.index(slot), call, C)
            if C.softcap:
                p = packed(p, dtype)  # besides the slope: half the registers
            barrier_if("sync", "256", TAKEN, j > 0)
            p_smem.store(in_register_order(slope, BLOCK_Q))
            signal(WEIGHTS)
            # The next tile's scores; after the last tile once more this one's, whose Q is still there.
            more = (j + 1 < count).to(gl.int32)
            following = slot ^ more
            mbarrier.wait(q_full.index(following), ((j + more) >> 1) & 1)
            q = q_ring.index(following).reshape([BLOCK_Q, D])
            s = warpgroup_mma(_keys(k_smem, never), q.permute((1, 0)), zero_s, use_acc=False, is_async=True)
            barrier_if("sync", "256", GRADIENT + (slot ^ 1), j > 0)
            ds = ds_smem.index(slot ^ 1)  # before the first tile, anything: it is not added
            dq = warpgroup_mma(_quarter(k_smem, never, 0), ds, zero_s, use_acc=False, is_async=True)
            mbarrier.wait(do_full.index(slot), (j >> 1) & 1)
            do = do_ring.index(slot).reshape([BLOCK_Q, D])
            if C.softcap:
                p = unpacked(p, dtype)
            dv = warpgroup_mma(gl.convert_layout(p.to(dtype), left), do, dv, is_async=True)
            s, dq = warpgroup_mma_wait(1, deps=[s, dq])
            release(RING + slot, j + 2 < count)
            add_directly(target + before, dq, j > 0, BLOCK_Q)
            dq = warpgroup_mma(_quarter(k_smem, never, 1), ds, zero_s, use_acc=False, is_async=True)
            dv, dq = warpgroup_mma_wait(0, deps=[dv, dq])
            release(RING + C.stages + slot, j + 2 < count)
            add_directly(target + before + QUARTER * BLOCK_Q, dq, j > 0, BLOCK_Q)
            before = ((head_place + member) * call.query_tiles + tile).to(gl.int64) * (BLOCK_Q * D)
            i, member, tiles = next_step(i, member, tiles, walk, C)
        last = (count - 1) & 1
        await_signal(GRADIENT + last)
        for part in gl.static_range(2):
            ds = ds_smem.index(last)
            dq = warpgroup_mma(_quarter(k_smem, 0, part), ds, zero_s, use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(0, deps=[dq])
            add_directly(target + before + part * (QUARTER * BLOCK_Q), dq, count > 0, BLOCK_Q)
    if C.left or C.right:
        note(notes, NAN, (_has_nan(dv),))
    meet()
    _store(dv, 1.0, call, notes, do_ring.index(0), 1, C)


@gluon.jit
def gradient_consumer(memory, bars, call, C: gl.constexpr):
    """Compute dS^T and dK of 64 keys, and the other half of dQ^T's dimensions (the second warpgroup, D = 256)."""
    k_smem, v_smem, q_ring, do_ring, row_ring, ds_smem, p_smem, target, notes = memory
    kv_full, q_full, do_full = bars
    walk, _masks, _first_key, head_place = work_of(gl.program_id(0), call, notes, C)
    dtype: gl.constexpr = k_smem.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    mma_d: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma_d, 2)
    zero_s = gl.zeros([HALF, BLOCK_Q], gl.float32, mma)
    dk = gl.zeros([HALF, D], gl.float32, mma_d)
    ordered: gl.constexpr = in_register_order(zero_s, BLOCK_Q).type.layout

    mbarrier.wait(kv_full.index(0), 0)
    count, member, tiles = first_step(walk, C)
    if count > 0:
        i = 0
        mbarrier.wait(do_full.index(0), 0)
        do = do_ring.index(0).reshape([BLOCK_Q, D])
        dp = warpgroup_mma(_keys(v_smem, 0), do.permute((1, 0)), zero_s, use_acc=False, is_async=True)
        dp = warpgroup_mma_wait(0, deps=[dp])
        for j in range(count):
            never = j >> 30
            slot = j & 1
            tile, _masked = tile_of(i, member, walk, C)
            place = ((head_place + member) * call.query_tiles + tile).to(gl.int64) * (BLOCK_Q * D)
            mbarrier.wait(q_full.index(slot), (j >> 1) & 1)
            delta = row_ring.index(slot).slice(BLOCK_Q, BLOCK_Q).load(gl.SliceLayout(0, mma))
            dp = dp - delta[None, :]
            await_signal(WEIGHTS)
            p = _out_of_register_order(p_smem.load(ordered), mma)
            more = (j + 1 < count).to(gl.int32)
            barrier_if("arrive", "256", TAKEN, more)
            ds = (p * dp).to(dtype)
            mine = ds_smem.index(slot)
            mine.store(ds)
            shared_stored()
            signal(GRADIENT + slot)
            # The next tile's dP^T; after the last tile once more this one's, whose dO is still there.
            following = slot ^ more
            mbarrier.wait(do_full.index(following), ((j + more) >> 1) & 1)
            do = do_ring.index(following).reshape([BLOCK_Q, D])
            dp = warpgroup_mma(_keys(v_smem, never), do.permute((1, 0)), zero_s, use_acc=False, is_async=True)
            dq = warpgroup_mma(_quarter(k_smem, never, 2), mine, zero_s, use_acc=False, is_async=True)
            q = q_ring.index(slot).reshape([BLOCK_Q, D])
            dk = warpgroup_mma(gl.convert_layout(ds, left), q, dk, is_async=True)
            dp, dq = warpgroup_mma_wait(1, deps=[dp, dq])
            release(RING + C.stages + slot, j + 2 < count)
            # A condition that the compiler does not see through: without one it spills.
            add_directly(target + place + 2 * QUARTER * BLOCK_Q, dq, opaque(j) >= 0, BLOCK_Q)
            dq = warpgroup_mma(_quarter(k_smem, never, 3), mine, zero_s, use_acc=False, is_async=True)
            dk, dq = warpgroup_mma_wait(0, deps=[dk, dq])
            release(RING + slot, j + 2 < count)
            add_directly(target + place + 3 * QUARTER * BLOCK_Q, dq, opaque(j) >= 0, BLOCK_Q)
            i, member, tiles = next_step(i, member, tiles, walk, C)
    meet()
    if C.left or C.right:
        _flag(_has_nan(dk), call, notes, C)
    _store(dk, gradient_scale(call, C), call, notes, q_ring.index(0), 0, C)


@gluon.jit
def _flag(nan, call, notes, C: gl.constexpr):
    """Say whether these keys' dK or dV hold a NaN that may come from a masked pair."""
    _walk, _masks, first_key, head_place = work_of(opaque(gl.program_id(0)), call, notes, C)
    kv_head = head_place // call.heads * (call.heads // C.group) + head_place % call.heads // C.group
    place = kv_head * call.key_tiles + first_key // HALF
    gl.store(call.flags + place, gl.maximum(nan, noted(notes, NAN).to(gl.int32)))


@gluon.jit
def _store(value, scale, call, notes, staging, WHICH: gl.constexpr, C: gl.constexpr):
    """Store dK (WHICH 0) or dV (1)."""
    _walk, _masks, first_key, head_place = work_of(opaque(gl.program_id(0)), call, notes, C)
    batch = head_place // call.heads
    kv_head = head_place % call.heads // C.group
    stride = noted_stride(notes, 3 * WHICH + 1, C)
    base = (call.dv if WHICH else call.dk) + batch * noted_stride(notes, 3 * WHICH, C) + first_key * stride
    base += kv_head * noted_stride(notes, 3 * WHICH + 2, C)
    store_keys(base, stride, value * scale, call.bounds.seqlen_k - first_key, staging, 0, D, C.head_dim)
