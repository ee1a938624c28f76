"""The small kernels before and after the fused backward kernel: each query's
statistics, and dQ's last step.

B batch, Sq queries, H query heads, D head dimension, padded to what the fused kernel computes
(HEAD_DIM: not padded).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..portable.launch import Table
from ..portable.tiles import Bounds, Strided, has_nan
from .backward_recompute_nonfinite import Inputs, keys_again, queries_again
from .sequences import LANES, begin_of, find, first_slot, sequence_of

BLOCK_Q = tl.constexpr(64)
FLAGS = tl.constexpr(128)  # that a program of the last kernel looks at


@triton.jit(do_not_specialize=["heads", "seqlen_q", "query_tiles", "flags_before", "sequences"])
def prepare_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, rows_ptr, dq_ptr, flags_ptr, out_strides, dout_strides,
    heads, seqlen_q,
    query_tiles, flags_before, cu_ptr, sequences, HAS_DLSE: tl.constexpr, RECOMPUTE: tl.constexpr,
    WHOLE: tl.constexpr,
    PACKED: tl.constexpr, COUNTERS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Kernel: one program computes the fused kernel's statistics of 64 queries of a head and clears
    its workspaces. rows_ptr: of each tile 64 base-2 log-sum-exps (+inf for rows that see nothing
    and for padding: weight 0), then 64 deltas, rowsum(dO * O) - dLSE. Zeros are stored in dQ's
    workspace dq_ptr or, if WHOLE, in the tile's flag if RECOMPUTE (see finish_kernel); if COUNTERS,
    also in the flags_before + 1 counters that follow flags_before flags. PACKED: tiles are slots
    (sequences.py) of sequences whose queries end where cu_ptr says."""
    tile = tl.program_id(0) % query_tiles
    head_index = tl.program_id(0) // query_tiles
    batch = (head_index // heads).to(tl.int64)
    head = (head_index % heads).to(tl.int64)
    row = tl.arange(0, BLOCK_Q)
    query = tile * BLOCK_Q + row
    real = query < seqlen_q
    if PACKED:
        number, within = find(tile, tl.arange(0, LANES), cu_ptr, sequences, seqlen_q, BLOCK_Q)
        query = begin_of(number, cu_ptr, sequences, seqlen_q) + within * BLOCK_Q + row
        real = query < begin_of(number + 1, cu_ptr, sequences, seqlen_q)
    column = tl.arange(0, D)[None, :]
    position = query.to(tl.int64)[:, None]
    inside = real[:, None]
    if HEAD_DIM < D:
        inside = inside & (column < HEAD_DIM)
    of_out = Strided(out_ptr, *out_strides)
    out_rows = of_out.pointer + batch * of_out.batch + head * of_out.head + position * of_out.row
    if HEAD_DIM < D:
        # What Triton does not see of strides that are multiples of 8 and not of 16: it would
        # read number by number.
        out_rows = tl.multiple_of(out_rows, [16, 16])
    out = tl.load(out_rows + column, mask=inside, other=0.0)
    of_dout = Strided(dout_ptr, *dout_strides)
    dout_rows = (
        of_dout.pointer + batch * of_dout.batch + head * of_dout.head + position * of_dout.row
    )
    if HEAD_DIM < D:
        dout_rows = tl.multiple_of(dout_rows, [16, 16])
    dout = tl.load(dout_rows + column, mask=inside, other=0.0)
    index = head_index.to(tl.int64) * seqlen_q + query
    lse2 = tl.load(lse_ptr + index, mask=real, other=float("inf")) * 1.4426950408889634
    lse2 = tl.where(lse2 == float("-inf"), float("inf"), lse2)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + index, mask=real, other=0.0)
    place = tl.program_id(0).to(tl.int64)
    tl.store(rows_ptr + place * (2 * BLOCK_Q) + row, lse2)
    tl.store(rows_ptr + place * (2 * BLOCK_Q) + BLOCK_Q + row, delta)
    if COUNTERS:
        counter = tl.program_id(0) * FLAGS + tl.arange(0, FLAGS)
        # Once, but where there are far more keys than queries.
        while tl.min(counter) <= flags_before:
            tl.store(flags_ptr + flags_before + counter, 0, mask=counter <= flags_before)
            counter += tl.num_programs(0) * FLAGS
    if WHOLE:
        if RECOMPUTE:
            tl.store(flags_ptr + flags_before + place, 0)
    else:
        cells = tl.arange(0, BLOCK_Q * D)
        tl.store(dq_ptr + place * (BLOCK_Q * D) + cells, tl.zeros([BLOCK_Q * D], tl.float32))


@triton.jit
def unfolded(flat, D: tl.constexpr):
    """Reorder dQ's tile from the order in which the fused kernel's registers hold it to (64, D)."""
    if D == 64:
        # Queries' bit 5, dimensions' bits 5-4, queries' 4-3, dimensions' 2-0, queries' 2-1,
        # dimensions' 3, queries' 0.
        tile = tl.reshape(
            tl.permute(tl.reshape(flat, (2, 4, 4, 8, 4, 2, 2)), (0, 2, 4, 6, 1, 5, 3)), (64, 64)
        )
    else:
        # Dimensions' bits 6 (and 7), 5-4, queries' 5-3, dimensions' 2-0, queries' 2-1,
        # dimensions' 3, queries' 0.
        parts = tl.reshape(flat, (D // 64, 4, 8, 8, 4, 2, 2))
        tile = tl.reshape(tl.permute(parts, (2, 4, 6, 0, 1, 5, 3)), (64, D))
    return tile


@triton.jit
def _store(base, stride_row, row, limit, value, D: tl.constexpr, HEAD_DIM: tl.constexpr):
    pointers = base + row.to(tl.int64)[:, None] * stride_row + tl.arange(0, D)[None, :]
    inside = row[:, None] < limit
    if HEAD_DIM < D:
        inside = inside & (tl.arange(0, D)[None, :] < HEAD_DIM)
    tl.store(pointers, value.to(base.dtype.element_ty), mask=inside)


class OfKeys(NamedTuple):
    """The arguments with which finish_kernel recomputes dK and dV of 64 keys. dk, dv:
    tensors to write (Strided)."""

    inputs: Any
    table: Any
    dk: Any
    dv: Any
    key_halves: Any  # of a head, 64 keys each


@triton.jit
def _moved(x, rows):
    """Return the Strided tensor x from row number `rows` on."""
    return Strided(x.pointer + rows.to(tl.int64) * x.row, x.batch, x.row, x.head)


@triton.jit
def _of_sequence(number, inputs, cu_q_ptr, cu_k_ptr, OF_KEYS: tl.constexpr):
    """Return (Inputs of packed sequence `number` alone, the packed row's indices of its first query
    and its first key). inputs: the packed row's, whose `plane` is the number of sequences."""
    query, key, bounds = sequence_of(
        number, cu_q_ptr, cu_k_ptr, inputs.plane, inputs.bounds, OF_KEYS
    )
    rows = inputs.rows + first_slot(number, query, BLOCK_Q).to(tl.int64) * (2 * BLOCK_Q)
    own = Inputs(
        _moved(inputs.q, query), _moved(inputs.k, key), _moved(inputs.v, key),
        _moved(inputs.dout, query), rows,
        inputs.heads, bounds, inputs.scale_log2, inputs.query_tiles, inputs.mask, inputs.plane,
        inputs.stride_mask,
        inputs.positions, inputs.stride_positions, number,
    )  # fmt: skip
    return own, query, key


@triton.jit
def _of_queries(program, inputs, target, cu_q_ptr, cu_k_ptr, PACKED: tl.constexpr):
    """Return (first query, Inputs, `target`) of tile number `program` of dQ; PACKED: of its
    sequence."""
    tile = program % inputs.query_tiles
    if PACKED:
        number, tile = find(
            tile, tl.arange(0, LANES), cu_q_ptr, inputs.plane, inputs.bounds.seqlen_q, BLOCK_Q
        )
        inputs, queries_at, _ = _of_sequence(number, inputs, cu_q_ptr, cu_k_ptr, False)
        target = _moved(target, queries_at)
    return tile * BLOCK_Q, inputs, target


@triton.jit
def _store_queries(
    program, first_query, dq, inputs, target, D: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Store dq, a tile of dQ whose first query is first_query, in `target` (a Strided). program:
    the tile's number over all heads."""
    head_index = program // inputs.query_tiles
    batch = (head_index // inputs.heads).to(tl.int64)
    base = (
        target.pointer
        + batch * target.batch
        + (head_index % inputs.heads).to(tl.int64) * target.head
    )
    _store(
        base,
        target.row,
        first_query + tl.arange(0, BLOCK_Q),
        inputs.bounds.seqlen_q,
        dq,
        D,
        HEAD_DIM,
    )


@triton.jit
def sum_of_parts(parts_ptr, half, key_halves, D: tl.constexpr, SPLIT: tl.constexpr):
    """Return (dK, dV) of 64 keys, (64, D): the sums of the parts that SPLIT items stored of
    them, in a fixed order."""
    head_index = half // key_halves
    place = (head_index * SPLIT * key_halves + half % key_halves).to(tl.int64)
    cells = tl.arange(0, 64 * D)
    dk = tl.zeros([64 * D], tl.float32)
    dv = tl.zeros([64 * D], tl.float32)
    for part in tl.static_range(SPLIT):
        pointer = parts_ptr + (place + part * key_halves) * (2 * 64 * D)
        dk += tl.load(pointer + cells)
        dv += tl.load(pointer + 64 * D + cells)
    return unfolded_keys(dk, D), unfolded_keys(dv, D)


@triton.jit
def unfolded_keys(flat, D: tl.constexpr):
    """Reorder a tile of dK or dV from the order of the fused kernel's registers to (64, D)."""
    # Keys' bits 5-4, dimensions' 3 and up, keys' 2-0, dimensions' 2-1, keys' 3, dimensions' 0.
    return tl.reshape(
        tl.permute(tl.reshape(flat, (4, D // 8, 8, 4, 2, 2)), (0, 4, 2, 1, 3, 5)), (64, D)
    )


@triton.jit
def _keys_again(
    half, scale, of_keys, parts_ptr, D: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
    F: tl.constexpr,
    PACKED: tl.constexpr, SPLIT: tl.constexpr, RECOMPUTE: tl.constexpr,
):  # fmt: skip
    """Store 64 keys' dK and dV. If SPLIT > 1 they are the sums of the parts that work items stored,
    recomputed if a sum has a NaN and RECOMPUTE; else they are recomputed. half: number of the 64
    keys over all heads."""
    dk_to = of_keys.dk
    dv_to = of_keys.dv
    inputs = of_keys.inputs
    kv_heads = inputs.heads // GROUP
    head_index = half // of_keys.key_halves
    batch = (head_index // kv_heads).to(tl.int64)
    kv_head = (head_index % kv_heads).to(tl.int64)
    first_key = (half % of_keys.key_halves) * 64
    if PACKED:
        cu_q_ptr = of_keys.table.blocks
        cu_k_ptr = of_keys.table.rows
        HALVES: tl.constexpr = 1 if D == 256 else 2  # of an item of the fused kernel
        KEYS: tl.constexpr = HALVES * 64
        slot = half % of_keys.key_halves // HALVES
        lanes = tl.arange(0, LANES)
        number, tile = find(slot, lanes, cu_k_ptr, inputs.plane, inputs.bounds.seqlen_k, KEYS)
        inputs, _, keys_at = _of_sequence(number, inputs, cu_q_ptr, cu_k_ptr, True)
        first_key = tile * KEYS + half % HALVES * 64
        dk_to = _moved(dk_to, keys_at)
        dv_to = _moved(dv_to, keys_at)
    if SPLIT > 1:
        dk, dv = sum_of_parts(parts_ptr, half, of_keys.key_halves, D, SPLIT)
        if RECOMPUTE:  # noqa: SIM102 - decided while compiling; while running
            if has_nan(dk) | has_nan(dv):
                dk, dv = keys_again(
                    first_key, batch, kv_head, inputs, of_keys.table, D, HEAD_DIM, GROUP, F
                )
                dk *= scale
    else:
        dk, dv = keys_again(first_key, batch, kv_head, inputs, of_keys.table, D, HEAD_DIM, GROUP, F)
        dk *= scale
    key = first_key + tl.arange(0, 64)
    seqlen_k = inputs.bounds.seqlen_k
    _store(
        dk_to.pointer + batch * dk_to.batch + kv_head * dk_to.head,
        dk_to.row,
        key,
        seqlen_k,
        dk,
        D,
        HEAD_DIM,
    )
    _store(
        dv_to.pointer + batch * dv_to.batch + kv_head * dv_to.head,
        dv_to.row,
        key,
        seqlen_k,
        dv,
        D,
        HEAD_DIM,
    )


@triton.jit(
    do_not_specialize=[
        "places", "heads", "seqlen_q", "seqlen_k", "band_left", "band_right", "query_tiles",
        "key_halves", "mask_plane",
        "stride_mask", "stride_positions", "stride_tb", "stride_th", "stride_tr", "stride_ub",
        "stride_uh", "stride_ur",
    ]
)  # fmt: skip
def finish_kernel(
    work_ptr, rows_ptr, flags_ptr, parts_ptr, q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, dk_ptr, dv_ptr,
    q_strides,
    k_strides, v_strides, dout_strides, dq_strides, dk_strides, dv_strides, scale, scale_log2,
    places, heads, seqlen_q,
    seqlen_k, band_left, band_right, query_tiles, key_halves, mask_ptr, mask_plane, stride_mask,
    positions_ptr,
    stride_positions, table_ptr, stride_tb, stride_th, stride_tr, list_ptr, keys_table_ptr,
    stride_ub, stride_uh,
    stride_ur, keys_list_ptr, RECOMPUTE: tl.constexpr, WHOLE: tl.constexpr, PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr, F: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Scale dQ from its float32 workspace and store it in its dtype, a tile of 64 queries a
    program. RECOMPUTE: pairs may be masked, and a NaN may come from one: such a tile is computed
    again and, by programs of their own, so are dK and dV of each 64 keys whose flag is set. WHOLE:
    dQ is stored already, and a program looks at FLAGS flags, first those of keys, then those of
    dQ's tiles. PACKED: tiles are slots; sequences' keys end where table_ptr and keys_table_ptr say,
    their queries where the lists say, and mask_plane is the number of sequences. SPLIT > 1:
    parts_ptr holds parts of dK and dV, which programs of their own sum up."""
    inputs = Inputs(
        Strided(q_ptr, *q_strides), Strided(k_ptr, *k_strides), Strided(v_ptr, *v_strides),
        Strided(dout_ptr, *dout_strides), rows_ptr, heads,
        Bounds(seqlen_q, seqlen_k, band_left, band_right),
        scale_log2, query_tiles, mask_ptr, mask_plane, stride_mask, positions_ptr, stride_positions,
        0,
    )  # fmt: skip
    table = Table(table_ptr, stride_tb, stride_th, stride_tr, list_ptr)
    dq_target = Strided(dq_ptr, *dq_strides)
    of_keys = OfKeys(
        inputs, Table(keys_table_ptr, stride_ub, stride_uh, stride_ur, keys_list_ptr),
        Strided(dk_ptr, *dk_strides),
        Strided(dv_ptr, *dv_strides), key_halves,
    )  # fmt: skip
    program = tl.program_id(0)
    if WHOLE:
        halves = places // query_tiles // GROUP * key_halves
        first = program * FLAGS
        number = first + tl.arange(0, FLAGS)
        if tl.max(tl.load(flags_ptr + number, mask=number < halves + places, other=0)) != 0:
            for flag in tl.range(first, tl.minimum(first + FLAGS, halves + places), num_stages=1):
                if tl.load(flags_ptr + flag) != 0:
                    if flag < halves:
                        _keys_again(
                            flag, scale, of_keys, parts_ptr, D, HEAD_DIM, GROUP, F, PACKED, 1, True
                        )
                    else:
                        place = flag - halves
                        first_query, own, target = _of_queries(
                            place, inputs, dq_target, list_ptr, table_ptr, PACKED
                        )
                        dq = queries_again(
                            first_query, place // query_tiles, own, table, D, HEAD_DIM, GROUP, F
                        )
                        _store_queries(place, first_query, dq * scale, own, target, D, HEAD_DIM)
    elif program < places:
        dq = unfolded(
            tl.load(work_ptr + program.to(tl.int64) * (BLOCK_Q * D) + tl.arange(0, BLOCK_Q * D)), D
        )
        first_query, own, target = _of_queries(
            program, inputs, dq_target, list_ptr, table_ptr, PACKED
        )
        if RECOMPUTE:  # noqa: SIM102 - decided while compiling; while running
            if has_nan(dq):
                dq = queries_again(
                    first_query, program // query_tiles, own, table, D, HEAD_DIM, GROUP, F
                )
        _store_queries(program, first_query, dq * scale, own, target, D, HEAD_DIM)
    elif SPLIT > 1:
        _keys_again(
            program - places, scale, of_keys, parts_ptr, D, HEAD_DIM, GROUP, F, PACKED, SPLIT,
            RECOMPUTE
        )  # fmt: skip
    elif RECOMPUTE:  # noqa: SIM102
        if tl.load(flags_ptr + program - places) != 0:
            _keys_again(
                program - places, scale, of_keys, parts_ptr, D, HEAD_DIM, GROUP, F, PACKED, 1, True
            )
