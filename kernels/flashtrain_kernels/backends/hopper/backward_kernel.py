"""The fused backward kernel: a program holds 128 keys of a head (64 at D = 256) and visits the
queries that see them.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension (64, 128 or 256,
padded to these). How its warps share the work: kernels/dev/HOPPER.md.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..portable.tiles import Bounds
from .assembly import note, noted
from .backward_consumers import narrow_consumer, wide_consumer
from .backward_consumers_d256 import key_consumer, value_consumer
from .backward_deterministic import add_in_order
from .backward_parts import LOADED, RING, await_release
from .backward_schedule import (
    BAND,
    BARRIERS,
    BLOCK_Q,
    FOUND,
    NUMBERS,
    TICKET,
    Call,
    first_step,
    item_of,
    next_step,
    sequence_of_item,
    share,
    store_number,
    take_number,
    tile_of,
    work_of,
)
from .dq_short import NOTES, note_whole
from .triton_compat import load_tile


class Choices(NamedTuple):
    """The compile-time constants of the fused backward kernel: tile sizes, kind of
    mask, switches for options."""

    stages: int  # of the ring of Q (and of dO at D = 64, else that has 2)
    keys: int = 128  # of an item
    head_dim: int = 64  # D, where the kernel's is padded
    group: int = 1  # query heads of an item: H / K, or a part of them
    split: int = 1  # items among which a key/value head's query heads are split
    left: bool = False  # the band has a bound on that side
    right: bool = False
    kind: int = 0  # how tiles are found: backward_schedule.BAND, PLAN or BLOCKS
    tiles: int = 1  # query tiles in a block of a block-sparse mask
    intervals: int = 0  # how many intervals of keys a query of a Mask sees
    key_positions: bool = False  # the Mask gives the keys' positions
    block_rows: int = 128  # keys of a row of the table of tiles
    aligned: bool = False  # the strides and addresses of the gradients are multiples of 8 numbers
    # At D = 64: a program has whole heads, and their dQ is its own (dq_short.py).
    whole: bool = False
    # At D = 64: a program takes one item after the other, by a counter behind the flags.
    counted: bool = False
    late: bool = False  # at D = 128: dQ is computed a tile late (backward_consumers.py)
    packed: bool = False  # sequences are packed (sequences.py)
    softcap: bool = False  # scale_log2 is a tuple (softcap.scale_of)
    # mask_ptr is the seed, and stride_mask the threshold (dropout_rng.with_changes).
    dropout: bool = False
    alibi: bool = False  # mask_ptr are the slopes, and stride_mask their stride
    # dQ is added up in one order, each program has one item; at D = 64 and 128, no masks.
    deterministic: bool = False


@gluon.jit
def _producer(descs, memory, bars, call, D: gl.constexpr, C: gl.constexpr):
    q_desc, k_desc, v_desc, do_desc, row_desc = descs
    k_smem, v_smem, q_ring, do_ring, row_ring, _ds_smem, _staging, _target, notes = memory
    kv_full, q_full, do_full = bars
    stage = 0
    turn = 0
    step = 0
    number, past, share_step = share(call, notes, C)
    while number < past:
        following = number + share_step
        if C.counted:
            following = take_number(call.flags + 2 * past) + share_step
        item = item_of(number, call, C.whole)
        pair = turn & 1 if D == 64 else 0
        if C.counted and C.packed:  # while the items before are computed
            sequence, key_tile = sequence_of_item(item, call, noted(notes, 9).to(gl.int32), C)
        await_release(LOADED + pair, turn >= 2)
        if C.counted:
            store_number(notes, NUMBERS + pair, number)
            if C.packed:
                store_number(notes, FOUND + 2 * pair, sequence)
                store_number(notes, FOUND + 2 * pair + 1, key_tile)
        walk, _masks, first_key, head_place = work_of(item, call, notes, C, pair)
        batch = head_place // call.heads
        first_head = head_place % call.heads
        full = kv_full.index(pair)
        mbarrier.expect(full, 2 * C.keys * D * 2)
        key = walk.keys_at + first_key
        load_tile(
            k_desc, [batch, key, first_head // (C.group * C.split), 0], full, k_smem.index(pair)
        )
        load_tile(
            v_desc, [batch, key, first_head // (C.group * C.split), 0], full, v_smem.index(pair)
        )
        turn += 1
        count, member, tiles = first_step(walk, C)
        i = 0
        for _ in range(count):
            tile, _masked = tile_of(i, member, walk, C)
            head = first_head + member
            place = (head_place + member) * call.query_tiles + tile
            await_release(RING + stage, step >= C.stages)
            full = q_full.index(stage)
            mbarrier.expect(full, BLOCK_Q * D * 2 + 2 * BLOCK_Q * 4)
            query = walk.queries_at + tile * BLOCK_Q
            load_tile(q_desc, [batch, query, head, 0], full, q_ring.index(stage))
            load_tile(row_desc, [place * (2 * BLOCK_Q)], full, row_ring.index(stage))
            if D == 64:
                slot = stage
            else:
                slot = step & 1
                await_release(RING + C.stages + slot, step >= 2)
            full = do_full.index(slot)
            mbarrier.expect(full, BLOCK_Q * D * 2)
            load_tile(do_desc, [batch, query, head, 0], full, do_ring.index(slot))
            stage = gl.where(stage + 1 == C.stages, 0, stage + 1)
            step += 1
            i, member, tiles = next_step(i, member, tiles, walk, C)
        number = following
    if C.counted:  # a number past the last item's ends the consumers' loop
        await_release(LOADED + (turn & 1), turn >= 2)
        store_number(notes, NUMBERS + (turn & 1), number)
        mbarrier.arrive(kv_full.index(turn & 1), count=1)
        await_release(LOADED + ((turn + 1) & 1), turn >= 1)
    if D == 64:
        STAGES: gl.constexpr = C.stages
        for left in gl.static_range(STAGES):  # every release must have been awaited
            await_release(RING + stage, step >= C.stages - left)
            stage = gl.where(stage + 1 == C.stages, 0, stage + 1)


@gluon.jit(
    do_not_specialize=[
        "stride_dkb", "stride_dks", "stride_dkh", "stride_dvb", "stride_dvs", "stride_dvh",
        "heads", "seqlen_q", "seqlen_k", "band_left", "band_right", "query_tiles", "key_tiles",
        "all_heads",
        "heads_together", "mask_plane", "stride_mask", "stride_positions", "stride_tb", "stride_th",
        "stride_tr",
        "stride_dqb", "stride_dqs", "stride_dqh",
    ]
)  # fmt: skip
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, row_desc, target, dk_ptr, dv_ptr, flags_ptr, stride_dkb,
    stride_dks, stride_dkh,
    stride_dvb, stride_dvs, stride_dvh, scale_log2, heads, seqlen_q, seqlen_k, band_left,
    band_right, query_tiles,
    key_tiles, all_heads, heads_together, mask_ptr, mask_plane, stride_mask, positions_ptr,
    stride_positions, table_ptr,
    stride_tb, stride_th, stride_tr, list_ptr, dq_ptr, stride_dqb, stride_dqs, stride_dqh,
    D: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV, and add up dQ in float32 (not at D = 256: backward_dq_d256.py). A program
    takes a block of C.keys keys of a key/value head (a work item, see backward_schedule.work_of),
    or at D = 64 several blocks.

    Args:
        q_desc, k_desc, v_desc, do_desc: TMA descriptors of q, k, v and dout.
        row_desc: (B H query_tiles 128,) float32: of each tile 64 base-2
            log-sum-exps, then 64 deltas.
        target: dQ's workspace, 64 D float32 a tile of queries, set to 0; a descriptor of
            rows of 32 at D = 128 and with C.deterministic. With C.whole it holds one head's
            tiles for each program.
        flags_ptr: (B K key_tiles 2,) int32: whether 64 keys got a NaN, if pairs may be
            masked. Behind it with C.whole a flag for each tile of queries, with
            C.deterministic 1 + 2 B K key_tiles counters, set to 0: of programs that began,
            and of the steps in which each block of keys has added to each half of dQ; with
            C.counted one, of the items that were taken.
        dk_ptr, dv_ptr: (B, Sk, K, D); with C.split > 1 both point to the float32 parts of dK
            and dV that work items store (backward_parts.store_part).
        all_heads: B K C.split. mask_ptr to list_ptr: see portable/launch.py; for packed
            sequences backward_launches.
        dq_ptr: (B, Sq, H, D), written with C.whole only.
    """
    dtype: gl.constexpr = q_desc.dtype
    STAGES: gl.constexpr = C.stages
    SLOTS: gl.constexpr = C.stages if D == 64 else 2
    PAIRS: gl.constexpr = 2 if D == 64 else 1
    k_smem = gl.allocate_shared_memory(dtype, [PAIRS, 1, C.keys, 1, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [PAIRS, 1, C.keys, 1, D], v_desc.layout)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_Q, 1, D], q_desc.layout)
    do_ring = gl.allocate_shared_memory(dtype, [SLOTS, 1, BLOCK_Q, 1, D], do_desc.layout)
    row_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_Q], row_desc.layout)
    if D == 256:  # not dS^T but P^T, on its way between the warpgroups
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        ds_smem = gl.allocate_shared_memory(gl.float32, [2, C.keys * BLOCK_Q], flat)
    else:
        ds_layout: gl.constexpr = gl.NVMMASharedLayout(64 if D == 64 else 128, 16, 2)
        ds_smem = gl.allocate_shared_memory(dtype, [3 if C.late else 2, C.keys, BLOCK_Q], ds_layout)
    if D == 128 or C.deterministic:
        staging = gl.allocate_shared_memory(gl.float32, [2, D, 32], target.layout)
    else:
        staging = ds_smem  # not used
    kv_full = gl.allocate_shared_memory(gl.int64, [PAIRS, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PAIRS):
        mbarrier.init(kv_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(do_full.index(i), count=1)
    fence_async_shared()

    PLACES: gl.constexpr = NOTES if C.whole else BARRIERS + 4 if C.deterministic else 18
    notes = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    PART: gl.constexpr = 8 if C.aligned else 1
    note(
        notes, 0, (stride_dkb // PART, stride_dks // PART, stride_dkh // PART, stride_dvb // PART,
            stride_dvs // PART,
            stride_dvh // PART),
    )  # fmt: skip
    if C.kind != BAND or C.packed or C.dropout or C.alibi:
        note(notes, 6, (stride_tb, stride_th, stride_tr, mask_plane, stride_mask, stride_positions))
    if C.deterministic:
        # In the order in which programs begin, whatever that of their ids is: who began
        # earlier is waited for.
        note(notes, TICKET, (gl.atomic_add(flags_ptr + 2 * key_tiles * all_heads, 1),))
        for i in gl.static_range(4):
            mbarrier.init(notes.index(BARRIERS + i), count=1)
        fence_async_shared()
    if C.whole:
        strides = (stride_dqb, stride_dqs, stride_dqh)
        note_whole(
            notes,
            dq_ptr,
            strides,
            heads,
            seqlen_q,
            key_tiles,
            flags_ptr + 2 * key_tiles * all_heads,
            C,
        )
    memory = (k_smem, v_smem, q_ring, do_ring, row_ring, ds_smem, staging, target, notes)
    bars = (kv_full, q_full, do_full)
    call = Call(
        scale_log2, heads, Bounds(seqlen_q, seqlen_k, band_left, band_right), query_tiles,
        key_tiles, all_heads,
        heads_together, mask_ptr, positions_ptr, table_ptr, list_ptr, dk_ptr, dv_ptr, flags_ptr,
    )  # fmt: skip
    descs = (q_desc, k_desc, v_desc, do_desc, row_desc)
    if C.packed and D == 256:  # a program has one item
        note(notes, FOUND, sequence_of_item(gl.program_id(0), call, mask_plane, C))
    if C.deterministic:
        gl.warp_specialize(
            [
                (narrow_consumer if D == 64 else wide_consumer, (memory, bars, call, 0, C)),
                (narrow_consumer if D == 64 else wide_consumer, (memory, bars, call, 1, C)),
                (_producer, (descs, memory, bars, call, D, C)),
                (add_in_order, (memory, call, 0, D, C)),
                (add_in_order, (memory, call, 1, D, C)),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )
    elif D <= 128:
        gl.warp_specialize(
            [
                (narrow_consumer if D == 64 else wide_consumer, (memory, bars, call, 0, C)),
                (narrow_consumer if D == 64 else wide_consumer, (memory, bars, call, 1, C)),
                (_producer, (descs, memory, bars, call, D, C)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (value_consumer, (memory, bars, call, C)),
                (key_consumer, (memory, bars, call, C)),
                (_producer, (descs, memory, bars, call, D, C)),
            ],
            [4, 1],
            [240, 24],
        )
