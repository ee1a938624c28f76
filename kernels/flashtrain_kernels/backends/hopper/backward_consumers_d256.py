"""The two consumer warpgroups of the backward kernel at D = 256, which do different work.
dQ: backward_dq_d256.py.

D head dimension (256). A tile is 64 queries, a block of keys 64 keys of a head; tiles of
scores are (keys, queries).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .assembly import note, noted, opaque, packed, unpacked
from .backward_parts import (
    BETWEEN,
    HALF,
    RING,
    await_signal,
    barrier_if,
    exponent,
    gradient_scale,
    has_nan,
    hide,
    in_register_order,
    meet,
    noted_stride,
    release,
    signal,
    store_keys,
    weights_of,
)
from .backward_schedule import BAND, BLOCK_Q, first_step, next_step, tile_of, work_of
from .backward_scores import keys_of_item

D = gl.constexpr(256)
# Named barriers between the warpgroups, one for each of P^T's two buffers: P^T is
# there, P^T was read.
WEIGHTS = gl.constexpr(BETWEEN.value)
TAKEN = gl.constexpr(BETWEEN.value + 2)
NAN = gl.constexpr(12)  # the place in `notes` where the first warpgroup says whether dV has a NaN


@gluon.jit
def _out_of_register_order(flat, LAYOUT: gl.constexpr):
    """Return the (64 keys, 64 queries) tile, in LAYOUT, of which `flat` is the result of
    in_register_order."""
    tile = flat.reshape([4, 8, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5)).reshape([HALF, BLOCK_Q])
    return gl.convert_layout(tile, LAYOUT, assert_trivial=True)


@gluon.jit
def _weights(s, tile, masked, keys, walk, masks, rows, call, dtype: gl.constexpr, C: gl.constexpr):
    """Return (P^T in dtype, two neighboring queries packed into an int32; the factor by which dP^T
    - delta gives dS^T) of a tile, from s = K Q^T. masked: hide masked pairs; keys: from
    `keys_of_item`."""
    mma: gl.constexpr = s.type.layout
    s = exponent(s, rows, call, C)
    if masked:
        s = hide(s, tile, keys[0], keys[1], walk.bounds, masks, C, mma)
    p, slope = weights_of(s, rows, call, C)
    return packed(p, dtype), slope


@gluon.jit
def value_consumer(memory, bars, call, C: gl.constexpr):
    """Run the first consumer warpgroup: compute P^T and dV of 64 keys. The product for dV of a tile
    runs during the next tile's exponentials."""
    k_smem, _v_smem, q_ring, do_ring, row_ring, p_smem, _staging, _target, notes = memory
    kv_full, q_full, do_full = bars
    walk, masks, first_key, _head_place = work_of(gl.program_id(0), call, notes, C)
    dtype: gl.constexpr = k_smem.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    mma_d: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma_d, 2)
    zero_s = gl.zeros([HALF, BLOCK_Q], gl.float32, mma)
    dv = gl.zeros([HALF, D], gl.float32, mma_d)

    mbarrier.wait(kv_full.index(0), 0)
    keys = keys_of_item(walk, masks, first_key, 0, C, mma)
    count, member, tiles = first_step(walk, C)
    if count > 0:
        i = 0
        mbarrier.wait(q_full.index(0), 0)
        q = q_ring.index(0).reshape([BLOCK_Q, D])
        s = warpgroup_mma(
            k_smem.index(0).reshape([HALF, D]),
            q.permute((1, 0)),
            zero_s,
            use_acc=False,
            is_async=True,
        )
        s = warpgroup_mma_wait(0, deps=[s])
        tile, masked = tile_of(i, member, walk, C)
        p, slope = _weights(s, tile, masked, keys, walk, masks, row_ring.index(0), call, dtype, C)
        p_smem.index(0).store(in_register_order(slope, BLOCK_Q))
        signal(WEIGHTS)
        release(RING, count > 2)
        i, member, tiles = next_step(i, member, tiles, walk, C)
        for j in range(1, count):
            never = j >> 30
            slot = j & 1
            before = slot ^ 1
            tile, masked = tile_of(i, member, walk, C)
            mbarrier.wait(q_full.index(slot), (j >> 1) & 1)
            q = q_ring.index(slot).reshape([BLOCK_Q, D])
            k = k_smem.index(never).reshape([HALF, D])
            s = warpgroup_mma(k, q.permute((1, 0)), zero_s, use_acc=False, is_async=True)
            mbarrier.wait(do_full.index(before), ((j - 1) >> 1) & 1)
            do = do_ring.index(before).reshape([BLOCK_Q, D])
            dv = warpgroup_mma(gl.convert_layout(unpacked(p, dtype), left), do, dv, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            following, slope = _weights(
                s, tile, masked, keys, walk, masks, row_ring.index(slot), call, dtype, C
            )
            barrier_if("sync", "256", TAKEN + slot, j > 1)
            p_smem.index(slot).store(in_register_order(slope, BLOCK_Q))
            signal(WEIGHTS + slot)
            release(RING + slot, j + 2 < count)
            i, member, tiles = next_step(i, member, tiles, walk, C)
            dv = warpgroup_mma_wait(0, deps=[dv])
            release(RING + C.stages + before, j + 1 < count)
            p = following
        last = (count - 1) & 1
        mbarrier.wait(do_full.index(last), ((count - 1) >> 1) & 1)
        do = do_ring.index(last).reshape([BLOCK_Q, D])
        dv = warpgroup_mma(gl.convert_layout(unpacked(p, dtype), left), do, dv, is_async=True)
        dv = warpgroup_mma_wait(0, deps=[dv])
    if C.left or C.right or C.kind != BAND or C.packed:
        note(notes, NAN, (has_nan(dv, dv),))
    meet()
    _store(dv, 1.0, call, notes, do_ring.index(0), 1, C)


@gluon.jit
def key_consumer(memory, bars, call, C: gl.constexpr):
    """Run the second consumer warpgroup: compute dS^T and dK of 64 keys. The product for dK of a
    tile runs while the next tile's P^T is awaited."""
    k_smem, v_smem, q_ring, do_ring, row_ring, p_smem, _staging, _target, notes = memory
    kv_full, q_full, do_full = bars
    walk, _masks, _first_key, _head_place = work_of(gl.program_id(0), call, notes, C)
    dtype: gl.constexpr = k_smem.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    mma_d: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma_d, 2)
    zero_s = gl.zeros([HALF, BLOCK_Q], gl.float32, mma)
    dk = gl.zeros([HALF, D], gl.float32, mma_d)
    ordered: gl.constexpr = in_register_order(zero_s, BLOCK_Q).type.layout

    mbarrier.wait(kv_full.index(0), 0)
    count, _member, _tiles = first_step(walk, C)
    if count > 0:
        mbarrier.wait(do_full.index(0), 0)
        do = do_ring.index(0).reshape([BLOCK_Q, D])
        dp = warpgroup_mma(
            v_smem.index(0).reshape([HALF, D]),
            do.permute((1, 0)),
            zero_s,
            use_acc=False,
            is_async=True,
        )
        dp = warpgroup_mma_wait(0, deps=[dp])
        release(RING + C.stages, count > 2)
        mbarrier.wait(q_full.index(0), 0)  # the statistics come with Q
        delta = row_ring.index(0).slice(BLOCK_Q, BLOCK_Q).load(gl.SliceLayout(0, mma))
        dp = dp - delta[None, :]
        await_signal(WEIGHTS)
        ds = packed(_out_of_register_order(p_smem.index(0).load(ordered), mma) * dp, dtype)
        barrier_if("arrive", "256", TAKEN, count > 2)
        for j in range(1, count):
            never = j >> 30
            slot = j & 1
            before = slot ^ 1
            mbarrier.wait(do_full.index(slot), (j >> 1) & 1)
            do = do_ring.index(slot).reshape([BLOCK_Q, D])
            v = v_smem.index(never).reshape([HALF, D])
            dp = warpgroup_mma(v, do.permute((1, 0)), zero_s, use_acc=False, is_async=True)
            q = q_ring.index(before).reshape([BLOCK_Q, D])
            dk = warpgroup_mma(gl.convert_layout(unpacked(ds, dtype), left), q, dk, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            release(RING + C.stages + slot, j + 2 < count)
            mbarrier.wait(q_full.index(slot), (j >> 1) & 1)
            delta = row_ring.index(slot).slice(BLOCK_Q, BLOCK_Q).load(gl.SliceLayout(0, mma))
            dp = dp - delta[None, :]
            await_signal(WEIGHTS + slot)
            following = packed(
                _out_of_register_order(p_smem.index(slot).load(ordered), mma) * dp, dtype
            )
            barrier_if("arrive", "256", TAKEN + slot, j + 2 < count)
            dk = warpgroup_mma_wait(0, deps=[dk])
            release(RING + before, j + 1 < count)
            ds = following
        q = q_ring.index((count - 1) & 1).reshape([BLOCK_Q, D])
        dk = warpgroup_mma(gl.convert_layout(unpacked(ds, dtype), left), q, dk, is_async=True)
        dk = warpgroup_mma_wait(0, deps=[dk])
    meet()
    _store(dk, gradient_scale(call, C), call, notes, q_ring.index(0), 0, C)


@gluon.jit
def _store(value, scale, call, notes, staging, WHICH: gl.constexpr, C: gl.constexpr):
    """Store `value` times `scale` as dK (WHICH 0) or dV (WHICH 1) of the program's keys. If pairs
    may be masked, WHICH 0 also stores the flag that says whether dK or dV holds a NaN."""
    walk, _masks, first_key, head_place = work_of(opaque(gl.program_id(0)), call, notes, C)
    batch = head_place // call.heads
    kv_head = head_place % call.heads // C.group
    if WHICH == 0 and (C.left or C.right or C.kind != BAND or C.packed):
        place = (batch * (call.heads // C.group) + kv_head) * call.key_tiles + walk.item_tile
        gl.store(
            call.flags + place, gl.maximum(has_nan(value, value), noted(notes, NAN).to(gl.int32))
        )
    left = walk.bounds.seqlen_k - first_key
    first_key += walk.keys_at
    stride = noted_stride(notes, 3 * WHICH + 1, C)
    base = (
        (call.dv if WHICH else call.dk)
        + batch * noted_stride(notes, 3 * WHICH, C)
        + first_key * stride
    )
    base += kv_head * noted_stride(notes, 3 * WHICH + 2, C)
    store_keys(base, stride, value * scale, left, staging, 0, D, C.head_dim)
