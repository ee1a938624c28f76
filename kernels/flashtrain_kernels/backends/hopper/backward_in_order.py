"""dQ added up in one order, for a deterministic backward: who waits for whom, and the warps that add.

Items are 128 keys, tiles 64 queries. An item visits its tiles from the last one down, and at a tile the item of the
keys before it adds first. So an item waits for one other only: the keys before it, of the same head. Every item counts
in global memory how many of its steps it has added; the next one reads that and adds no step before the other has added
its own of the same tile. An item that has once seen the other far ahead need not look again for a while.

No grid can deadlock: the item of the keys before has a lower number, programs have one item each, and the hardware
starts programs in the order of their numbers. Of those that run, the lowest waits for nobody. And as all go down the
tiles at the same speed, one that starts no earlier than the one before it is behind it all the way: it waits for a
moment when it starts, at most. With grouped heads a tile's heads follow each other, so that this is so there, too (head
by head, items of few keys to see would run ahead and wait at each head).

What waits is a warp for each warpgroup that only adds: a consumer hands it a tile in shared memory and goes on. That
warp adds by the copy engine, waits until the numbers are in memory, and only then counts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .backward_parts import copy_engine_adds, in_register_order, shared_stored
from .backward_schedule import BLOCK_Q, first_step, next_step, tile_of, work_of

NEVER = gl.constexpr(1 << 30)  # more steps than any item has


@gluon.jit
def steps_behind(walk, first_key, C: gl.constexpr):
    """How much lower than an item's step is that of the item of the keys before it, at the same tile. NEVER for the first
    keys of a sequence: nobody is before it."""
    behind = 0
    if C.left:
        high = gl.minimum(walk.bounds.seqlen_q, first_key - walk.bounds.left)  # what the keys before are seen up to
        before = (gl.maximum(high, 0) + BLOCK_Q - 1) // BLOCK_Q
        behind = (walk.reach.past - before) * C.group
    return gl.where(first_key == 0, NEVER, behind)


@gluon.jit
def hand_over(dq, staging, taken, full, number, PART: gl.constexpr):
    """Give a warpgroup's half of a tile of dQ^T to its adding warp. number: how many were given before."""
    mbarrier.wait(taken, (number & 1) ^ 1)
    staging.store(in_register_order(dq, PART).reshape([2 * PART, 32]))
    shared_stored()
    mbarrier.arrive(full)


@gluon.jit
def _await_steps(pointer, needed, known):
    """Wait until the item before has added `needed` steps, of which `known` are known; how many they are now. What is
    added after that comes after them (the fence: the copy engine's additions are another kind of access)."""
    return gl.inline_asm_elementwise(
        """{ .reg .pred p;
        mov.b32 $0, $3;
        setp.ge.s32 p, $3, $2;
        @p bra KNOWN;
        AGAIN: ld.acquire.gpu.global.b32 $0, [$1];
        setp.lt.s32 p, $0, $2;
        @p bra AGAIN;
        fence.proxy.async.global;
        KNOWN: bar.warp.sync 0xffffffff; }""",
        "=&r,l,r,r,~{memory}", [pointer, needed, known], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _addition_read():
    """Wait until the copy engine has read what this warp had it add."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group.read 0; bar.warp.sync 0xffffffff; mov.u32 $0, 0;",
        "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _count_when_added(pointer, steps):
    """Wait until what this warp had added is in memory, and let the next item know. By the thread that the copy engine
    was told by: elect.sync chooses the same one every time."""
    gl.inline_asm_elementwise(
        """{ .reg .pred p;
        cp.async.bulk.wait_group 0;
        elect.sync _|p, 0xffffffff;
        @p st.release.gpu.global.b32 [$1], $2;
        mov.u32 $0, 0; }""",
        "=r,l,r,~{memory}", [pointer, steps], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def counter_of(item_tile, head_place, call, WG: gl.constexpr, C: gl.constexpr):
    """Where an item counts its steps, after all items' flags; two numbers below it the item of the keys before does."""
    kv_heads = call.heads // C.group
    kv_head = head_place // call.heads * kv_heads + head_place % call.heads // C.group
    return (call.key_tiles * (call.all_heads + kv_head) + item_tile) * 2 + WG


@gluon.jit
def adder(memory, bars, call, WG: gl.constexpr, D: gl.constexpr, C: gl.constexpr):
    """Add what a warpgroup hands over, in order. One warp."""
    staging, target, notes = memory[6], memory[7], memory[8]
    full, taken = bars[3].index(WG), bars[3].index(2 + WG)
    ROWS: gl.constexpr = BLOCK_Q * D // 32  # of the workspace, a tile
    walk, _masks, first_key, head_place = work_of(gl.program_id(0), call, notes, C)
    tile_place = walk.item_tile if C.packed else first_key // C.keys
    counter = (call.flags + counter_of(tile_place, head_place, call, WG, C)).to(gl.int64)
    behind = steps_behind(walk, first_key, C)
    count, member, tiles = first_step(walk, C.kind, C.tiles, C.group)
    known = 0
    i = 0
    for j in range(count):
        tile, _masked = tile_of(i, member, walk, C.kind, C.tiles, C.deterministic)
        row = ((head_place + member) * call.query_tiles + tile) * ROWS + WG * (ROWS // 2)
        mbarrier.wait(full, j & 1)
        known = _await_steps(counter - 8, j + 1 - behind, known)
        copy_engine_adds(target, [row, 0], staging.index(WG))
        _addition_read()
        mbarrier.arrive(taken)
        _count_when_added(counter, j + 1)
        i, member, tiles = next_step(i, member, tiles, walk, C.kind, C.tiles, C.group, C.deterministic)
