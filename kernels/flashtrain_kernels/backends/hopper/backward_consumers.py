"""The consumer warpgroups of the fused backward kernel at D = 64 and D = 128.

D head dimension. S^T, P^T, dP^T and dS^T are (64 keys of the warpgroup, 64 queries of the tile).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward_deterministic import await_taken, hand_over
from .backward_parts import (
    BETWEEN,
    HALF,
    LOADED,
    RING,
    add_by_copy,
    add_directly,
    await_signal,
    left_keys,
    left_transposed,
    meet,
    release,
    shared_stored,
    signal,
    store_results,
)
from .backward_schedule import (
    BLOCK_Q,
    NUMBERS,
    first_step,
    item_of,
    load_number,
    next_step,
    own_number,
    share,
    tile_of,
    work_of,
)
from .backward_scores import (
    changes_of_item,
    dropped_weights_of,
    keys_of_item,
    score_gradients_of,
    scores_of,
)
from .dq_short import settle


@gluon.jit
def following_stage(stage, phase, more, STAGES: gl.constexpr):
    """Return the next buffer's index in a ring of STAGES, and its barrier's phase; the
    given ones if not `more`."""
    wraps = stage + 1 == STAGES
    return gl.where(more, gl.where(wraps, 0, stage + 1), stage), gl.where(
        more & wraps, phase ^ 1, phase
    )


@gluon.jit
def narrow_consumer(memory, bars, call, WG: gl.constexpr, C: gl.constexpr):
    """Run consumer warpgroup WG at D = 64: compute dK and dV of 64 keys and, while the next tile's
    scores are computed, half of each tile's dQ^T, so that neither warpgroup waits for the other's
    dS. Arguments: made in backward_kernel."""
    # K and V are left operands in registers. The producer fetches the next item's K,
    # V, Q and dO meanwhile.
    k_smem, v_smem, q_ring, do_ring, row_ring, ds_smem, staging, target, notes = memory
    kv_full, q_full, do_full = bars
    D: gl.constexpr = 64
    PART: gl.constexpr = 32  # queries of a tile whose dQ^T this warpgroup computes
    STAGES: gl.constexpr = C.stages
    # dP only when the mask is done with: it takes registers, too.
    LATE: gl.constexpr = C.intervals == 2
    dtype: gl.constexpr = k_smem.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    mma_q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    zero_s = gl.zeros([HALF, BLOCK_Q], gl.float32, mma)
    zero_q = gl.zeros([HALF, PART], gl.float32, mma_q)
    stage = 0
    phase = 0
    turn = 0
    number, items, share_step = share(call, notes, C)
    while number < items:
        item = item_of(number, call, C.whole)
        slot = turn & 1
        if C.counted:  # then the item's sequence is there, too
            mbarrier.wait(kv_full.index(slot), (turn >> 1) & 1)
        walk, masks, first_key, head_place = work_of(item, call, notes, C, slot)
        meet()
        if not C.counted:
            mbarrier.wait(kv_full.index(slot), (turn >> 1) & 1)
        k = left_keys(k_smem, slot, WG, D).load(left)
        v = left_keys(v_smem, slot, WG, D).load(left)
        dk = gl.zeros([HALF, D], gl.float32, mma)
        dv = gl.zeros([HALF, D], gl.float32, mma)
        keys = keys_of_item(walk, masks, first_key, WG, C, mma)
        count, member, tiles = first_step(walk, C)
        slope, threshold, draws = changes_of_item(keys, walk, masks, head_place, call, notes, C)
        if count > 0:
            i = 0
            dq_here = target
            tile_here = 0
            mbarrier.wait(q_full.index(stage), phase)
            q = q_ring.index(stage).reshape([BLOCK_Q, D])
            s = warpgroup_mma(k, q.permute((1, 0)), zero_s, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            signal(BETWEEN + 2 * (1 - WG) + 1)
            for j in range(count):
                tile, masked = tile_of(i, member, walk, C)
                q = q_ring.index(stage).reshape([BLOCK_Q, D])
                do = do_ring.index(stage).reshape([BLOCK_Q, D])
                rows = row_ring.index(stage)
                mbarrier.wait(do_full.index(stage), phase)
                if not LATE:
                    dp = warpgroup_mma(v, do.permute((1, 0)), zero_s, use_acc=False, is_async=True)
                # The tile before: by now the other warpgroup's part of dS is there (before the
                # first tile, anything).
                await_signal(BETWEEN + 2 * WG + ((j + 1) & 1))
                ds_all = ds_smem.index((j + 1) & 1).slice(WG * PART, PART, dim=1)
                dq = warpgroup_mma(
                    left_transposed(k_smem, slot + (j >> 30), WG, D),
                    ds_all,
                    zero_q,
                    use_acc=False,
                    is_async=True,
                )
                s, slope = scores_of(
                    s,
                    slope,
                    rows,
                    tile,
                    masked,
                    i,
                    member,
                    keys,
                    walk,
                    masks,
                    head_place,
                    call,
                    notes,
                    C,
                    mma,
                )
                if LATE:
                    dp = warpgroup_mma(v, do.permute((1, 0)), zero_s, use_acc=False, is_async=True)
                p, p16, factor, draws = dropped_weights_of(
                    s,
                    draws,
                    threshold,
                    rows,
                    tile,
                    i,
                    member,
                    keys,
                    walk,
                    masks,
                    head_place,
                    call,
                    dtype,
                    C,
                )
                dv = warpgroup_mma(gl.convert_layout(p16, left), do, dv, is_async=True)
                dp, dq = warpgroup_mma_wait(1, deps=[dp, dq])
                ds = score_gradients_of(p, factor, dp, threshold, rows, C, mma).to(dtype)
                ds_smem.index(j & 1).slice(WG * HALF, HALF).store(ds)
                shared_stored()
                signal(BETWEEN + 2 * (1 - WG) + (j & 1))
                before = stage
                # The next tile's scores; after the last tile once more this one's,
                # whose Q is still there.
                stage, phase = following_stage(stage, phase, j + 1 < count, STAGES)
                mbarrier.wait(q_full.index(stage), phase)
                following = q_ring.index(stage).reshape([BLOCK_Q, D])
                s = warpgroup_mma(
                    k, following.permute((1, 0)), zero_s, use_acc=False, is_async=True
                )
                dk = warpgroup_mma(gl.convert_layout(ds, left), q, dk, is_async=True)
                if C.deterministic:
                    if j > 0:
                        hand_over(staging, notes, dq, j, WG, PART)
                elif C.whole:
                    if j > 0:
                        settle(dq, target, tile_here, first_key, head_place, call, notes, WG, C)
                    tile_here = tile
                else:
                    add_directly(dq_here, dq, j > 0, PART)
                    place = ((head_place + member) * call.query_tiles + tile).to(gl.int64)
                    dq_here = target + place * (BLOCK_Q * D) + WG * (HALF * PART)
                i, member, tiles = next_step(i, member, tiles, walk, C)
                # ptxas would serialise a product whose left operand is in registers, in flight
                # over the loop's end.
                dv, s, dk = warpgroup_mma_wait(0, deps=[dv, s, dk])
                release(RING + before, j >= 0)
            await_signal(BETWEEN + 2 * WG + ((count + 1) & 1))
            ds_all = ds_smem.index((count + 1) & 1).slice(WG * PART, PART, dim=1)
            dq = warpgroup_mma(
                left_transposed(k_smem, slot, WG, D), ds_all, zero_q, use_acc=False, is_async=True
            )
            dq = warpgroup_mma_wait(0, deps=[dq])
            wraps = stage + 1 == STAGES
            stage = gl.where(wraps, 0, stage + 1)
            phase = gl.where(wraps, phase ^ 1, phase)
            if C.deterministic:
                hand_over(staging, notes, dq, count, WG, PART)
            elif C.whole:
                settle(dq, target, tile_here, first_key, head_place, call, notes, WG, C)
            else:
                add_directly(dq_here, dq, count > 0, PART)
        store_results(dk, dv, item, call, notes, slot, ds_smem.index(0), WG, D, C)
        release(LOADED + slot, C.counted | (number + 2 * share_step < items))
        turn += 1
        if C.counted:
            mbarrier.wait(kv_full.index(turn & 1), (turn >> 1) & 1)
            number = load_number(notes, NUMBERS + (turn & 1))
        else:
            number += share_step


@gluon.jit
def wide_consumer(memory, bars, call, WG: gl.constexpr, C: gl.constexpr):
    """Run consumer warpgroup WG at D = 128: compute dK, dV of 64 keys, and half of dQ^T's
    rows. See narrow_consumer."""
    # dK and dV take 128 registers: the other operands come from shared memory. With C.late dQ^T is
    # computed a tile late, so that neither warpgroup waits for the other's dS. There are then three
    # slots of dS: what is stored in one was last read two tiles ago, and the other's signal of the
    # tile before says that it has read it. Before the first tile nothing may be added, not even
    # outside of the workspace: a negative coordinate is illegal to TMA.
    k_smem, v_smem, q_ring, do_ring, row_ring, ds_smem, staging, target, notes = memory
    kv_full, q_full, do_full = bars
    walk, masks, first_key, head_place = work_of(own_number(notes, C), call, notes, C)
    D: gl.constexpr = 128
    PART: gl.constexpr = 64
    STAGES: gl.constexpr = C.stages
    SLOTS: gl.constexpr = 3 if C.late else 2
    # dP only when the mask is done with: it takes registers, too.
    LATE: gl.constexpr = C.intervals > 0 or C.softcap
    dtype: gl.constexpr = k_smem.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    mma_d: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma_d, 2)
    zero_s = gl.zeros([HALF, BLOCK_Q], gl.float32, mma)
    dk = gl.zeros([HALF, D], gl.float32, mma_d)
    dv = gl.zeros([HALF, D], gl.float32, mma_d)

    mbarrier.wait(kv_full.index(0), 0)
    keys = keys_of_item(walk, masks, first_key, WG, C, mma)
    count, member, tiles = first_step(walk, C)
    slope, threshold, draws = changes_of_item(keys, walk, masks, head_place, call, notes, C)
    if count > 0:
        i = 0
        stage = 0
        phase = 0
        mbarrier.wait(q_full.index(0), 0)
        q = q_ring.index(0).reshape([BLOCK_Q, D])
        s = warpgroup_mma(
            left_keys(k_smem, 0, WG, D), q.permute((1, 0)), zero_s, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=[s])
        if C.late:
            signal(BETWEEN + 2 * (1 - WG) + 1)
        slot = 0
        last = SLOTS - 1
        row = 0
        for j in range(count):
            never = j >> 30
            tile, masked = tile_of(i, member, walk, C)
            q = q_ring.index(stage).reshape([BLOCK_Q, D])
            do = do_ring.index(j & 1).reshape([BLOCK_Q, D])
            rows = row_ring.index(stage)
            mbarrier.wait(do_full.index(j & 1), (j >> 1) & 1)
            if not LATE:
                dp = warpgroup_mma(
                    left_keys(v_smem, never, WG, D),
                    do.permute((1, 0)),
                    zero_s,
                    use_acc=False,
                    is_async=True,
                )
            s, slope = scores_of(
                s,
                slope,
                rows,
                tile,
                masked,
                i,
                member,
                keys,
                walk,
                masks,
                head_place,
                call,
                notes,
                C,
                mma,
            )
            if LATE:
                dp = warpgroup_mma(
                    left_keys(v_smem, never, WG, D),
                    do.permute((1, 0)),
                    zero_s,
                    use_acc=False,
                    is_async=True,
                )
            p, p16, factor, draws = dropped_weights_of(
                s,
                draws,
                threshold,
                rows,
                tile,
                i,
                member,
                keys,
                walk,
                masks,
                head_place,
                call,
                dtype,
                C,
            )
            dv = warpgroup_mma(gl.convert_layout(p16, left), do, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            ds = score_gradients_of(p, factor, dp, threshold, rows, C, mma).to(dtype)
            if C.late:
                await_signal(BETWEEN + 2 * WG + ((j + 1) & 1))
            ds_smem.index(slot).slice(WG * HALF, HALF).store(ds)
            shared_stored()
            if C.late:
                signal(BETWEEN + 2 * (1 - WG) + (j & 1))
            before = stage
            stage, phase = following_stage(stage, phase, j + 1 < count, STAGES)
            if not C.late:
                meet()
            # Before the first tile, anything: it is not added.
            ds_all = ds_smem.index(last if C.late else slot)
            dq = warpgroup_mma(
                left_transposed(k_smem, never, WG, D), ds_all, zero_s, use_acc=False, is_async=True
            )
            dv = warpgroup_mma_wait(1, deps=[dv])  # then P^T's registers are free, which dS^T needs
            mbarrier.wait(q_full.index(stage), phase)
            following = q_ring.index(stage).reshape([BLOCK_Q, D])
            s = warpgroup_mma(
                left_keys(k_smem, never, WG, D),
                following.permute((1, 0)),
                zero_s,
                use_acc=False,
                is_async=True,
            )
            dk = warpgroup_mma(gl.convert_layout(ds, left), q, dk, is_async=True)
            s, dq = warpgroup_mma_wait(1, deps=[s, dq])
            release(RING + STAGES + (j & 1), j + 2 < count)
            place = ((head_place + member) * call.query_tiles + tile) * (BLOCK_Q * D // 32) + WG * (
                2 * PART
            )
            if C.deterministic:
                if C.late:
                    if j > 0:
                        hand_over(staging, notes, dq, j, WG, PART)
                else:
                    hand_over(staging, notes, dq, j + 1, WG, PART)
            elif not C.late:
                add_by_copy(target, staging.index(WG), place, dq, PART)
            elif j > 0:
                add_by_copy(target, staging.index(WG), row, dq, PART)
            row = place
            last = slot
            slot = gl.where(slot == SLOTS - 1, 0, slot + 1)
            i, member, tiles = next_step(i, member, tiles, walk, C)
            # See narrow_consumer: not over the loop's end.
            dk = warpgroup_mma_wait(0, deps=[dk])
            release(RING + before, j + STAGES < count)
        if C.late:
            await_signal(BETWEEN + 2 * WG + ((count + 1) & 1))
            ds_all = ds_smem.index(last)
            dq = warpgroup_mma(
                left_transposed(k_smem, 0, WG, D), ds_all, zero_s, use_acc=False, is_async=True
            )
            dq = warpgroup_mma_wait(0, deps=[dq])
            if C.deterministic:
                hand_over(staging, notes, dq, count, WG, PART)
            else:
                add_by_copy(target, staging.index(WG), row, dq, PART)
        if C.deterministic:
            await_taken(notes, count + 1, WG)  # dK and dV go through the same memory
        else:
            tma.store_wait(0)
    store_results(dk, dv, own_number(notes, C), call, notes, 0, staging.index(WG), WG, D, C)
