"""The deterministic part of the fused backward kernel: a warp of its own adds up dQ in
the order of the keys.

D head dimension. A tile of dQ is 64 queries of a head; each of two warpgroups (WG) computes half of
it, and has an adding warp. Why no program waits for ever: kernels/dev/HOPPER.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .assembly import stores_done
from .backward_parts import in_register_order, reduce_by_copy, shared_stored
from .backward_schedule import (
    BARRIERS,
    BLOCK_Q,
    counter_of,
    first_step,
    next_step,
    own_number,
    steps_behind,
    tile_of,
    work_of,
)


@gluon.jit
def await_taken(notes, number, WG: gl.constexpr):
    """Wait until warpgroup WG's adding warp has read what `hand_over` stored in the
    calls before call `number`."""
    # At once before the first time: the phase before none.
    mbarrier.wait(notes.index(BARRIERS + 2 + WG), number & 1)


@gluon.jit
def hand_over(staging, notes, dq, number, WG: gl.constexpr, PART: gl.constexpr):
    """Pass dq, warpgroup WG's half of a tile of dQ^T, to WG's adding warp in shared memory. number:
    how many times WG has called this before."""
    await_taken(notes, number, WG)
    staging.index(WG).store(in_register_order(dq, PART).reshape([2 * PART, 32]))
    shared_stored()
    mbarrier.arrive(notes.index(BARRIERS + WG), count=1)


@gluon.jit
def _await_steps(counter, needed, known):
    """Wait until the number at `counter` in global memory is at least `needed`, unless `known`, a
    number read before, already is; return the number. Additions to dQ before the number was stored
    come before ours."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; mov.b32 $0, $3; setp.ge.s32 p, $3, $2; @p bra KNOWN; AGAIN: "
        "ld.acquire.gpu.global.b32 $0, [$1]; setp.lt.s32 p, $0, $2; @p bra AGAIN; "
        "fence.proxy.async.global; KNOWN: bar.warp.sync 0xffffffff; }",
        "=&r,l,r,r,~{memory}", [counter.to(gl.int64, bitcast=True), needed, known],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _count(counter, steps):
    """Store the number `steps` at `counter` in global memory. Additions to dQ that this warp waited
    for (stores_done) come before it."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; bar.warp.sync 0xffffffff; mov.u32 t, %laneid; setp.eq.u32 p, "
        "t, 0; @p st.release.gpu.global.b32 [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r,~{memory}", [counter.to(gl.int64, bitcast=True), steps], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def add_in_order(memory, call, WG: gl.constexpr, D: gl.constexpr, C: gl.constexpr):
    """Run warpgroup WG's adding warp: add each half tile of dQ^T that WG passes by `hand_over` to
    dQ in global memory, after the programs of all preceding keys have added to the same tile.
    memory, call: made in backward_kernel."""
    _k_smem, _v_smem, _q_ring, _do_ring, _row_ring, _ds_smem, staging, target, notes = memory
    walk, _masks, first_key, head_place = work_of(own_number(notes, C), call, notes, C)
    own = call.flags + (2 * call.key_tiles * call.all_heads + 1 + WG)
    own += 2 * counter_of(first_key, walk, head_place, call, C)
    behind = steps_behind(walk, first_key, C)
    count, member, tiles = first_step(walk, C)
    known = 0
    i = 0
    for j in range(count):
        tile, _masked = tile_of(i, member, walk, C)
        place = (head_place + member) * call.query_tiles + tile
        mbarrier.wait(notes.index(BARRIERS + WG), j & 1)
        known = _await_steps(own - 2, j + 1 - behind, known)
        reduce_by_copy(target, [place * (BLOCK_Q * D // 32) + WG * D, 0], staging.index(WG))
        tma.store_wait(0)
        mbarrier.arrive(notes.index(BARRIERS + 2 + WG), count=1)
        stores_done()
        _count(own, j + 1)
        i, member, tiles = next_step(i, member, tiles, walk, C)
