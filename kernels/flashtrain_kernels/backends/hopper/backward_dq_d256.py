"""dQ at D = 256, by a kernel of its own: a program holds 128 queries of a head and visits
the keys that they see.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension (256,
padded). A tile is 64 keys; each of two consumer warpgroups has 64 queries; tiles of
scores are (queries, keys).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..portable.tiles import Bounds
from .assembly import capped, exp2_few, note, noted, packed, unpacked
from .backward_parts import (
    HIDDEN_TANH,
    RING,
    await_release,
    gradient_scale,
    has_nan,
    release,
    store_keys,
)
from .backward_schedule import BLOCK_Q
from .forward_masks import MaskTables, hide, origin, pieces_of, place
from .sequences import LANES, find, first_slot
from .triton_compat import load_tile

D = gl.constexpr(256)
KEYS = gl.constexpr(64)  # a tile's
ROWS = gl.constexpr(128)  # queries of a program
# The hardware barrier of V's buffer; K's two have RING and the next.
VALUES = gl.constexpr(RING.value + 2)
# Where `notes`, int64 words of shared memory, have an Item, and from where on the mask.
MASK = gl.constexpr(10)


class Call(NamedTuple):
    """The arguments that are the same for all programs; their meaning: see dq_kernel."""

    scale_log2: Any
    heads: Any
    tiles: Any
    row_tiles: Any
    all_heads: Any
    heads_together: Any
    rows: Any
    dq: Any
    flags: Any
    strides: Any


class Item(NamedTuple):
    """What a program computes: 128 queries of a head."""

    batch: Any  # row
    head: Any
    first: Any  # query, of its sequence
    queries_at: Any  # where the sequence's queries and keys begin; 0 where none are packed
    keys_at: Any
    tile: Any  # of 64 queries' statistics: where the sequence's begin
    bounds: Any  # the sequence's


@gluon.jit
def _work(program, call, bounds, mask, list_ptr, C: gl.constexpr):
    """Return the Item of a program. Of each `heads_together` heads the last queries come first,
    which see most below a causal mask."""
    group = program // (call.heads_together * call.tiles)
    number = program % (call.heads_together * call.tiles)
    together = gl.minimum(call.heads_together, call.all_heads - group * call.heads_together)
    head_index = group * call.heads_together + number % together
    tile = call.tiles - 1 - number // together
    batch = head_index // call.heads
    statistics = 0
    if C.packed:
        lanes = gl.arange(
            0, LANES, layout=gl.BlockedLayout([LANES // 32], [32], [gl.num_warps()], [0])
        )
        batch, tile = find(tile, lanes, list_ptr, mask.plane, bounds.seqlen_q, ROWS)
    sequence = batch
    batch, queries_at, keys_at, own = origin(batch, bounds, mask, list_ptr, C.packed)
    if C.packed:
        statistics = first_slot(sequence, queries_at, BLOCK_Q)
    return Item(batch, head_index % call.heads, tile * ROWS, queries_at, keys_at, statistics, own)


@gluon.jit
def _item(notes):
    """Load the program's Item from `notes`: kept, it would take registers that the loop needs."""
    bounds = Bounds(
        noted(notes, 6).to(gl.int32), noted(notes, 7).to(gl.int32), noted(notes, 8).to(gl.int32),
        noted(notes, 9).to(gl.int32),
    )  # fmt: skip
    return Item(
        noted(notes, 0).to(gl.int32), noted(notes, 1).to(gl.int32), noted(notes, 2).to(gl.int32),
        noted(notes, 3).to(gl.int32), noted(notes, 4).to(gl.int32), noted(notes, 5).to(gl.int32),
        bounds,
    )  # fmt: skip


@gluon.jit
def _mask(notes, F: gl.constexpr):
    """Load (MaskTables, Mask.keys, Mask.queries) from `notes`; numbers without a Mask."""
    table = noted(notes, MASK)
    keys = noted(notes, MASK + 5)
    queries = noted(notes, MASK + 6)
    if F.intervals:
        table = table.to(gl.pointer_type(gl.int32))
        keys = keys.to(gl.pointer_type(gl.int32))
        queries = queries.to(gl.pointer_type(gl.int32))
    tables = MaskTables(
        table, noted(notes, MASK + 1), 0, noted(notes, MASK + 2), noted(notes, MASK + 3),
        noted(notes, MASK + 4),
    )  # fmt: skip
    return tables, keys, queries


@gluon.jit
def _pieces(item, mask, F: gl.constexpr):
    """Return (traversal.Pieces of the tiles of keys that the Item's queries see, their number)."""
    pieces = pieces_of(item.batch, item.head, item.first, item.bounds, mask, F, ROWS, KEYS)
    count = gl.where(item.first < item.bounds.seqlen_q, pieces.masked + pieces.full, 0)
    return pieces, count


@gluon.jit
def _produce(descs, memory, notes, F: gl.constexpr, C: gl.constexpr):
    q_desc, k_desc, v_desc, do_desc = descs
    q_smem, do_smem, k_ring, v_smem, own_full, k_full, v_full = memory
    item = _item(notes)
    mask, list_ptr, _rows_ptr = _mask(notes, F)
    pieces, count = _pieces(item, mask, F)
    kv_head = item.head // C.group
    mbarrier.expect(own_full, 2 * ROWS * D * 2)
    for w in gl.static_range(2):
        query = [item.batch, item.queries_at + item.first + w * BLOCK_Q, item.head, 0]
        load_tile(do_desc, query, own_full, do_smem.index(w))
        load_tile(q_desc, query, own_full, q_smem.index(w))
    for j in range(count):
        key = item.keys_at + place(j, pieces, list_ptr, F, 1, KEYS)
        await_release(VALUES, j >= 1)
        mbarrier.expect(v_full, KEYS * D * 2)
        load_tile(v_desc, [item.batch, key, kv_head, 0], v_full, v_smem.index(0))
        slot = j & 1
        await_release(RING + slot, j >= 2)
        mbarrier.expect(k_full.index(slot), KEYS * D * 2)
        load_tile(k_desc, [item.batch, key, kv_head, 0], k_full.index(slot), k_ring.index(slot))


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
    s, dp, lse2, delta, step, masked, notes, call, dtype: gl.constexpr, W: gl.constexpr,
    F: gl.constexpr,
):  # fmt: skip
    """Return dS in dtype, two neighboring keys packed into an int32, from s = Q K^T and dp = dO V^T
    of the tile of keys visited at `step`. lse2, delta: the queries' statistics; masked: how many
    steps need a mask."""
    LAYOUT: gl.constexpr = s.type.layout
    if F.softcap:
        x = capped(s, call.scale_log2)
    else:
        x = s * call.scale_log2 - lse2[:, None]
    if step < masked:
        item = _item(notes)
        mask, list_ptr, rows_ptr = _mask(notes, F)
        row = item.first + W * BLOCK_Q + gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(1, LAYOUT))
        HIDDEN: gl.constexpr = HIDDEN_TANH if F.softcap else float("-inf")
        x = hide(
            x, row, step, True, (item.batch, item.head, item.first), item.bounds, mask, list_ptr,
            rows_ptr, F, ROWS, 1, HIDDEN,
        )  # fmt: skip
    if F.softcap:
        p = exp2_few(x * call.scale_log2[8] - lse2[:, None])
        p = p - p * (x * x)
    else:
        p = exp2_few(x)
    return packed(p * (dp - delta[:, None]), dtype)


@gluon.jit
def _consume(memory, call, notes, W: gl.constexpr, F: gl.constexpr, C: gl.constexpr):
    """Run consumer warpgroup W: compute dQ of its 64 queries. The product for dQ of a tile runs
    during the next tile's exponentials."""
    q_smem, _do_smem, k_ring, _v_smem, own_full, _k_full, _v_full = memory
    item = _item(notes)
    mask, _list_ptr, _rows_ptr = _mask(notes, F)
    pieces, count = _pieces(item, mask, F)
    masked = pieces.masked
    dtype: gl.constexpr = q_smem.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    mma_d: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma_d, 2)
    zero = gl.zeros([BLOCK_Q, KEYS], gl.float32, mma)
    dq = gl.zeros([BLOCK_Q, D], gl.float32, mma_d)
    number = gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(1, mma))
    # Statistics come in whole tiles of 64 queries: where this one is past the end,
    # any other's will do.
    tile = (item.batch * call.heads + item.head) * call.row_tiles + gl.minimum(
        item.tile + item.first // BLOCK_Q + W, call.row_tiles - 1
    )
    rows = call.rows + tile.to(gl.int64) * (2 * BLOCK_Q)
    lse2 = gl.load(rows + number)
    delta = gl.load(rows + BLOCK_Q + number)
    mbarrier.wait(own_full, 0)
    if count > 0:
        dp, s = _products(memory, gl.to_tensor(0), zero, W)
        dp, s = warpgroup_mma_wait(0, deps=[dp, s])
        release(VALUES, count > 1)
        ds = _gradients(s, dp, lse2, delta, 0, masked, notes, call, dtype, W, F)
        for j in range(1, count):
            before = (j & 1) ^ 1
            dp, s = _products(memory, j, zero, W)
            k = k_ring.index(before).reshape([KEYS, D])
            dq = warpgroup_mma(gl.convert_layout(unpacked(ds, dtype), left), k, dq, is_async=True)
            dp = warpgroup_mma_wait(2, deps=[dp])
            release(VALUES, j + 1 < count)
            s = warpgroup_mma_wait(1, deps=[s])
            following = _gradients(s, dp, lse2, delta, j, masked, notes, call, dtype, W, F)
            # Never; but the compiler would move the wait below to before the exponentials.
            if call.heads < 0:
                mbarrier.wait(own_full, 0)
            dq = warpgroup_mma_wait(0, deps=[dq])
            release(RING + before, j + 1 < count)
            ds = following
        k = k_ring.index((count - 1) & 1).reshape([KEYS, D])
        dq = warpgroup_mma(gl.convert_layout(unpacked(ds, dtype), left), k, dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
    item = _item(notes)
    rows_left = item.bounds.seqlen_q - item.first
    if F.left or F.right or F.intervals or C.packed:
        nan = has_nan(dq, dq)
        if (nan > 0) & (rows_left > W * BLOCK_Q):
            gl.store(
                call.flags
                + (item.batch * call.heads + item.head) * call.row_tiles
                + (item.tile + item.first // BLOCK_Q + W),
                nan,
            )
    stride_b, stride_s, stride_h = call.strides
    UNIT: gl.constexpr = 8 if C.aligned else 1
    base = call.dq + item.batch.to(gl.int64) * stride_b + item.head.to(gl.int64) * stride_h
    base += (item.queries_at + item.first).to(gl.int64) * (stride_s * UNIT)
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
        "band_right", "tiles", "row_tiles", "all_heads", "heads_together", "mask_plane",
        "stride_mask", "stride_positions", "stride_tb", "stride_th", "stride_tr",
    ]
)  # fmt: skip
def dq_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_ptr, dq_ptr, flags_ptr, flags_before, stride_dqb,
    stride_dqs, stride_dqh,
    scale_log2, heads, seqlen_q, seqlen_k, band_left, band_right, tiles, row_tiles, all_heads,
    heads_together, mask_ptr, mask_plane, stride_mask, positions_ptr, stride_positions, table_ptr,
    stride_tb, stride_th, stride_tr, list_ptr,
    F: gl.constexpr,
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
        mask_ptr to list_ptr: see portable/launch.py; for packed sequences backward_launches.
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
        scale_log2, heads, tiles, row_tiles, all_heads, heads_together, rows_ptr, dq_ptr,
        flags_ptr + flags_before, (stride_dqb, stride_dqs, stride_dqh),
    )  # fmt: skip
    listed = positions_ptr
    if C.packed:
        listed = list_ptr
    mask = MaskTables(table_ptr, stride_tb, stride_th, stride_tr, stride_mask, mask_plane)
    item = _work(
        gl.program_id(0), call, Bounds(seqlen_q, seqlen_k, band_left, band_right), mask, listed, C
    )
    notes = gl.allocate_shared_memory(gl.int64, [MASK + 7, 1], mbarrier.MBarrierLayout())
    own = item.bounds
    note(
        notes, 0, (item.batch, item.head, item.first, item.queries_at, item.keys_at, item.tile,
            own.seqlen_q, own.seqlen_k, own.left, own.right),
    )  # fmt: skip
    note(notes, MASK, (table_ptr, stride_tb, stride_tr, stride_mask, mask_plane, listed, mask_ptr))
    gl.warp_specialize(
        [
            (_consume, (memory, call, notes, 0, F, C)),
            (_consume, (memory, call, notes, 1, F, C)),
            (_produce, ((q_desc, k_desc, v_desc, do_desc), memory, notes, F, C)),
        ],
        [4, 1],
        [240, 24],
    )
