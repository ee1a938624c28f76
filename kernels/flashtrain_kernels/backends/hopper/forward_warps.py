"""The forward kernel's warps: a producer fetches tiles, consumer warpgroups of C.rows
queries compute with them.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension (C.block_d:
padded). F: features. C: forward.Constants.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..portable.dropout_rng import load_stream
from .alibi import lean, load_slope
from .assembly import (
    barrier,
    capped,
    exp2,
    exp2_few,
    log2,
    packed,
    reciprocal,
    stay,
    stores_done,
    stores_of_warpgroup_done,
    unpacked,
)
from .backward_schedule import take_number
from .dropout_rng import drop, first_round, keep_scale
from .forward_masks import hide, origin, pieces_of, place
from .forward_recompute_nonfinite import attend_tile_again, rows_of
from .forward_schedule import hand_over, handed_over, item_of, rounds, work_item
from .triton_compat import load_tile, store_tile

# The row maximum of a row that has seen nothing yet. Finite, so that exp2(-inf -
# maximum) is 0 and never NaN.
_NOTHING = gl.constexpr(-3.0e38)
# Named barriers: 9 and up, one for each consumer warpgroup's turn.
_TURN = gl.constexpr(9)


@gluon.jit
def _fetch(descriptor, place_in_tensor, full, empty, buffer, number, C: gl.constexpr):
    """Wait for ring place number % stages to be free, and fetch a tile of
    keys or values into it."""
    slot = number % C.stages
    mbarrier.wait(empty.index(slot), ((number // C.stages) & 1) ^ 1)
    mbarrier.expect(full.index(slot), C.block_k * buffer.shape[4] * 2)
    load_tile(descriptor, place_in_tensor, full.index(slot), buffer.index(slot))


@gluon.jit
def produce(arguments, F: gl.constexpr, C: gl.constexpr):
    """Run the producer warp: load each consumer's queries, then tiles of keys and
    values, keys a tile ahead."""
    _descriptors, _buffers, barriers, work, bounds, mask, list_ptr, handed, counter = arguments
    taken = 0
    if C.counted:
        number = 0
        index = gl.program_id(0)
        while index < work.total:
            item = item_of(index, work, bounds, mask, list_ptr, C)
            index = take_number(counter) + gl.num_programs(0)
            taken = _produce_tile(number, item, taken, arguments, F, C)
            number += 1
        CONSUMERS: gl.constexpr = C.consumers
        for w in gl.static_range(CONSUMERS):  # a tile of no head ends the consumers' loops
            place_q = (number % C.q_stages) * CONSUMERS + w
            mbarrier.wait(barriers[1].index(place_q), ((number // C.q_stages) & 1) ^ 1)
            hand_over((number, number * 0 - 1, number), handed, place_q)
            mbarrier.arrive(barriers[0].index(place_q), count=1)
    else:
        for number in range(0, rounds(work, C.paired)):
            item = work_item(number, work, bounds, mask, list_ptr, C)
            taken = _produce_tile(number, item, taken, arguments, F, C)


@gluon.jit
def _produce_tile(number, item, taken, arguments, F: gl.constexpr, C: gl.constexpr):
    """Load what a tile of queries needs, `number` of this program's. Return how many tiles of keys
    were loaded, with the `taken` before."""
    descriptors, buffers, barriers, _work, bounds, mask, list_ptr, handed, _counter = arguments
    q_desc, k_desc, v_desc, _out_desc = descriptors
    q_smem, k_smem, v_smem, _out_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    CONSUMERS: gl.constexpr = C.consumers
    TILE_Q: gl.constexpr = C.consumers * C.rows
    BLOCK_K: gl.constexpr = C.block_k
    TILES: gl.constexpr = C.tiles
    batch, head, first_query = item
    batch, queries_at, keys_at, own = origin(batch, bounds, mask, list_ptr, C.packed)
    kv_head = head // C.group
    pieces = pieces_of(batch, head, first_query, own, mask, F, TILE_Q, BLOCK_K)
    count = gl.maximum(gl.where(first_query < own.seqlen_q, pieces.masked + pieces.full, 0), 1)
    place_q = (number % C.q_stages) * C.consumers
    free = ((number // C.q_stages) & 1) ^ 1
    before = keys_at + place(0, pieces, list_ptr, F, TILES, BLOCK_K)
    if C.block_d > 128:  # queries wait for the output before them to leave, keys need not
        _fetch(k_desc, [batch, before, kv_head, 0], k_full, k_empty, k_smem, taken, C)
    for w in gl.static_range(CONSUMERS):
        mbarrier.wait(q_empty.index(place_q + w), free)
        if C.counted:
            hand_over(item, handed, place_q + w)
        mbarrier.expect(q_full.index(place_q + w), C.rows * C.block_d * 2)
        load_tile(
            q_desc,
            [batch, queries_at + first_query + w * C.rows, head, 0],
            q_full.index(place_q + w),
            q_smem.index(place_q + w),
        )
    if C.block_d <= 128:
        _fetch(k_desc, [batch, before, kv_head, 0], k_full, k_empty, k_smem, taken, C)
    for step in range(1, count):
        key = keys_at + place(step, pieces, list_ptr, F, TILES, BLOCK_K)
        _fetch(k_desc, [batch, key, kv_head, 0], k_full, k_empty, k_smem, taken + step, C)
        _fetch(v_desc, [batch, before, kv_head, 0], v_full, v_empty, v_smem, taken + step - 1, C)
        before = key
    taken += count
    _fetch(v_desc, [batch, before, kv_head, 0], v_full, v_empty, v_smem, taken - 1, C)
    return taken


@gluon.jit
def _arrived(full, buffer, number, C: gl.constexpr):
    """Wait until tile `number` of keys or values is in the ring (at number % C.stages), and return
    its buffer."""
    slot = number % C.stages
    mbarrier.wait(full.index(slot), (number // C.stages) & 1)
    return buffer.index(slot).reshape([C.block_k, buffer.shape[4]])


@gluon.jit
def _capped(scores, terms, F: gl.constexpr):
    """Return softcap's tanh of the scores (with C.bounded the exponents of the weights), the scores
    themselves without softcap. Masked pairs are hidden later."""
    if F.softcap:
        scores = capped(scores, terms)
    return scores


@gluon.jit
def _softmax(scores, row_max, scale, C: gl.constexpr):
    """(weights, rescale, new maximum): weights are 2^(scale * score - maximum)."""
    if C.bounded:
        weights = exp2(scores)
        rescale = row_max
        new_max = row_max
    else:
        new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
        weights = exp2(scores * scale - new_max[:, None])
        rescale = exp2_few(row_max - new_max)
    return weights, rescale, new_max


@gluon.jit
def _rescaled(acc, rescale, C: gl.constexpr):
    """Return acc, the sum of weighted values so far, rescaled to the new maximum of each row."""
    if not C.bounded:
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc


@gluon.jit
def _sums(weights, C: gl.constexpr):
    """Return the sum of each row of weights: (rows,), or with C.tight (rows, 4), a partial sum for
    each of the four threads that hold a row, so that they need not exchange numbers."""
    if C.tight:
        ROWS: gl.constexpr = weights.shape[0]
        GROUPS: gl.constexpr = weights.shape[1] // 8
        sums = gl.sum(gl.sum(weights.reshape([ROWS, GROUPS, 4, 2]), 3), 1)
    else:
        sums = gl.sum(weights, 1)
    return sums


@gluon.jit
def _add(sums, rescale, weights, C: gl.constexpr):
    """Return the row sums so far, rescaled to the new maximum, plus those of another tile."""
    more = _sums(weights, C)
    if C.bounded:
        rescale = 1.0
    elif C.tight:
        rescale = gl.convert_layout(rescale, gl.SliceLayout(1, more.type.layout))[:, None]
    return sums * rescale + more


@gluon.jit
def _rounded(weights, DTYPE: gl.constexpr, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Return the weights in DTYPE, as the left operand of their product with V. C.tight: packed in
    int32 (assembly.packed), else LLVM would round them only just before the product."""
    if C.tight:
        p = packed(weights, DTYPE)
    else:
        p = gl.convert_layout(weights.to(DTYPE), LAYOUT)
    return p


@gluon.jit
def _products(q, k, no_scores, C: gl.constexpr):
    """Start the product q k^T, and return its result to come."""
    if C.block_d == 256 and C.head_dim <= 192:  # the last quarter is zeros
        first, last = k.slice(0, 128, dim=1), k.slice(128, 64, dim=1)
        scores = hopper.warpgroup_mma(
            q.slice(0, 128, dim=1), first.permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        scores = hopper.warpgroup_mma(
            q.slice(128, 64, dim=1), last.permute((1, 0)), scores, is_async=True
        )
    else:
        scores = hopper.warpgroup_mma(q, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    return scores


@gluon.jit
def _operand(p, DTYPE: gl.constexpr, LAYOUT: gl.constexpr, C: gl.constexpr):
    if C.tight:
        p = gl.convert_layout(unpacked(p, DTYPE), LAYOUT)
    return p


@gluon.jit
def _finish(
    acc,
    row_sum,
    row_max,
    lse_ptrs,
    inside,
    buffer,
    descriptor,
    place_out,
    left,
    origins,
    C: gl.constexpr,
):
    """Divide, and store the output and the log-sum-exp. left: how many rows from here
    on are the sequence's."""
    ROWS: gl.constexpr = acc.shape[0]
    BLOCK_V: gl.constexpr = acc.shape[1]
    empty = row_sum == 0
    weight = gl.where(empty, 1.0, row_sum)
    gl.store(
        lse_ptrs, gl.where(empty, float("-inf"), (row_max + log2(weight)) * 0.6931471805599453),
        mask=inside
    )  # fmt: skip
    out = acc * gl.convert_layout(reciprocal(weight), gl.SliceLayout(1, acc.type.layout))[:, None]
    tma.store_wait(0)
    buffer.reshape([ROWS, BLOCK_V]).store(out.to(buffer.dtype))
    hopper.fence_async_shared()
    if C.packed:
        if left >= ROWS:
            store_tile(descriptor, place_out, buffer)
        else:
            _store_rows(buffer, place_out, left, origins, C)
    else:
        store_tile(descriptor, place_out, buffer)


@gluon.jit
def _store_rows(buffer, place_out, left, origins, C: gl.constexpr):
    """Store the first `left` rows of a tile of the output. (The TMA unit would write whole tiles,
    and so into the next packed sequence.)"""
    ROWS: gl.constexpr = C.rows
    BLOCK_V: gl.constexpr = C.block_v
    WIDE: gl.constexpr = BLOCK_V // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // WIDE, WIDE], [4, 1], [1, 0])
    value = buffer.reshape([ROWS, BLOCK_V]).load(LAYOUT)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, BLOCK_V, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    base, stride = rows_of(origins, 12, place_out[0], place_out[2], buffer.dtype)
    pointers = base + (place_out[1] + row).to(gl.int64) * stride + column
    gl.store(pointers, value, mask=(row < left) & (column < C.value_dim))


@gluon.jit
def consume(W: gl.constexpr, arguments, F: gl.constexpr, C: gl.constexpr):
    """Run consumer warpgroup W: compute the rows [W * C.rows, (W + 1) * C.rows)
    of each tile of queries."""
    work, bounds, mask, list_ptr = arguments[3:7]
    q_full, handed = arguments[2][0], arguments[11]
    taken = 0
    if C.turns and C.consumers - 1 == W:
        barrier("arrive", _TURN)
    BLOCK_V: gl.constexpr = C.block_v
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    ROWS: gl.constexpr = C.rows
    nothing = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, LAYOUT))
    if C.counted:
        mbarrier.wait(q_full.index(W), 0)
        batch, head, first_query = handed_over(handed, W)
        number = 0
        while head >= 0:
            item = (batch, head, first_query)
            taken, spoilt, _following = _consume_tile(
                number, item, taken, nothing, W, arguments, F, C
            )
            if gl.max((spoilt != spoilt).to(gl.int32), 0) > 0:
                tma.store_wait(0)
                stores_of_warpgroup_done(_TURN + C.consumers + W)
                attend_tile_again(item, W, arguments, F, C)
            number += 1
            arrived = (number % C.q_stages) * C.consumers + W
            mbarrier.wait(q_full.index(arrived), (number // C.q_stages) & 1)
            batch, head, first_query = handed_over(handed, arrived)
        tma.store_wait(0)
    else:
        batch, head, first_query = work_item(0, work, bounds, mask, list_ptr, C)
        for number in range(0, rounds(work, C.paired)):
            item = (batch, head, first_query)
            taken, nothing, following = _consume_tile(
                number, item, taken, nothing, W, arguments, F, C
            )
            batch, head, first_query = following
        tma.store_wait(0)
        if F.left or F.right or F.intervals or F.block_q or C.packed:
            # A hidden value that is NaN or inf, perhaps: its weight is 0, and the product NaN.
            # Rare, so looked at once.
            stores_done()
            if gl.max((nothing != nothing).to(gl.int32), 0) > 0:
                for number in range(0, rounds(work, C.paired)):
                    item = work_item(number, work, bounds, mask, list_ptr, C)
                    attend_tile_again(item, W, arguments, F, C)


@gluon.jit
def _consume_tile(
    number, item, taken, nothing, W: gl.constexpr, arguments, F: gl.constexpr, C: gl.constexpr
):
    """Compute this warpgroup's rows of the tile of queries `item`, `number` of this program's.
    Return (tiles of keys taken, with those before; `nothing` with 0 times the output added; the
    item that follows, without C.counted)."""
    # The order of the products, C.turns and C.tight: kernels/dev/HOPPER.md. C.bounded: a softcap
    # bounds the exponents, so that one number for all stands for the maximum of a row, and nothing
    # is looked for or rescaled.
    (
        descriptors,
        buffers,
        barriers,
        work,
        bounds,
        mask,
        list_ptr,
        rows_ptr,
        lse_ptr,
        scale,
        origins,
        _handed,
    ) = arguments
    terms = scale
    if F.softcap:
        scale = terms[8]
    q_smem, k_smem, v_smem, out_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    TILE_Q: gl.constexpr = C.consumers * C.rows
    ROWS: gl.constexpr = C.rows
    BLOCK_K: gl.constexpr = C.block_k
    BLOCK_D: gl.constexpr = C.block_d
    BLOCK_V: gl.constexpr = C.block_v
    TILES: gl.constexpr = C.tiles
    DTYPE: gl.constexpr = q_smem.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    no_scores = gl.zeros([ROWS, BLOCK_K], gl.float32, layout=S_LAYOUT)
    batch, head, first_query = item
    if F.dropout:
        stream = load_stream(rows_ptr, batch, head)
    if F.alibi:  # of scores that are not scaled yet
        slope = load_slope(rows_ptr, mask.rows_batch, batch, mask.plane, head, C.packed) / scale
    batch, queries_at, _keys_at, own = origin(batch, bounds, mask, list_ptr, C.packed)
    pieces = pieces_of(batch, head, first_query, own, mask, F, TILE_Q, BLOCK_K)
    some = gl.where(first_query < own.seqlen_q, pieces.masked + pieces.full, 0)
    # A tile of queries that sees nothing visits one tile, wholly hidden.
    count = gl.maximum(some, 1)
    masked = gl.where(some == 0, 1, pieces.masked)
    row = first_query + W * ROWS + gl.arange(0, ROWS, layout=S_ROWS)
    if F.dropout:
        queries = first_round(stream, row + (own.seqlen_k - own.seqlen_q))
    place_q = (number % C.q_stages) * C.consumers + W
    q = q_smem.index(place_q).reshape([ROWS, BLOCK_D])
    if not C.counted:
        mbarrier.wait(q_full.index(place_q), (number // C.q_stages) & 1)
    k = _arrived(k_full, k_smem, taken, C)
    scores = _products(q, k, no_scores, C)
    scores = hopper.warpgroup_mma_wait(0, [scores])
    mbarrier.arrive(k_empty.index(taken % C.stages), count=1)
    scores = _capped(scores, terms, F)
    if F.alibi:
        first_key = place(0, pieces, list_ptr, F, TILES, BLOCK_K)
        scores = lean(scores, (row + (own.seqlen_k - own.seqlen_q - first_key))[:, None], slope)
    if masked > 0:
        scores = hide(
            scores, row, 0, some > 0, item, own, mask, list_ptr, rows_ptr, F, TILE_Q, TILES
        )
    row_max = gl.full([ROWS], terms[2] if C.bounded else _NOTHING, gl.float32, layout=S_ROWS)
    weights, rescale, row_max = _softmax(scores, row_max, scale, C)
    row_sum = _sums(weights, C)
    if F.dropout:
        first_key = place(0, pieces, list_ptr, F, TILES, BLOCK_K)
        weights = drop(weights, queries, first_key, stream, mask.rows_batch)
    p = _rounded(weights, DTYPE, P_LAYOUT, C)
    acc = gl.zeros([ROWS, BLOCK_V], gl.float32, layout=O_LAYOUT)
    for step in range(1, count):
        k = _arrived(k_full, k_smem, taken + step, C)
        if C.turns:
            barrier("sync", _TURN + W)
        scores = _products(q, k, no_scores, C)
        v = _arrived(v_full, v_smem, taken + step - 1, C)
        if C.tight:
            acc = _rescaled(acc, stay(rescale), C)
        acc = hopper.warpgroup_mma(_operand(p, DTYPE, P_LAYOUT, C), v, acc, is_async=True)
        if C.turns:
            barrier("arrive", _TURN + (W + 1) % C.consumers)
        scores = hopper.warpgroup_mma_wait(1, [scores])
        mbarrier.arrive(k_empty.index((taken + step) % C.stages), count=1)
        scores = _capped(scores, terms, F)
        if F.alibi:
            first_key = place(step, pieces, list_ptr, F, TILES, BLOCK_K)
            scores = lean(scores, (row + (own.seqlen_k - own.seqlen_q - first_key))[:, None], slope)
        if step < masked:
            scores = hide(
                scores, row, step, True, item, own, mask, list_ptr, rows_ptr, F, TILE_Q, TILES
            )
        weights, rescale, row_max = _softmax(scores, row_max, scale, C)
        row_sum = _add(row_sum, rescale, weights, C)
        if F.dropout:
            first_key = place(step, pieces, list_ptr, F, TILES, BLOCK_K)
            weights = drop(weights, queries, first_key, stream, mask.rows_batch)
        if C.tight:
            following_p = _rounded(weights, DTYPE, P_LAYOUT, C)
            # Never; but ptxas would move the wait below to before the softmax.
            if bounds.seqlen_q < 0:
                mbarrier.wait(q_full.index(0), 0)
        acc = hopper.warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_empty.index((taken + step - 1) % C.stages), count=1)
        if C.tight:
            p = following_p
        else:
            acc = _rescaled(acc, rescale, C)
            p = _rounded(weights, DTYPE, P_LAYOUT, C)
    taken += count
    v = _arrived(v_full, v_smem, taken - 1, C)
    if C.tight:
        acc = _rescaled(acc, rescale, C)
    acc = hopper.warpgroup_mma(_operand(p, DTYPE, P_LAYOUT, C), v, acc, is_async=True)
    if BLOCK_V <= 128:
        mbarrier.arrive(q_empty.index(place_q), count=1)
    following = item
    if not C.counted:
        # While the product runs.
        following = work_item(number + 1, work, bounds, mask, list_ptr, C)
    acc = hopper.warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(v_empty.index((taken - 1) % C.stages), count=1)

    if F.dropout:
        acc = acc * keep_scale(mask.rows_batch)
    if C.tight:
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), S_ROWS)
    place_out = [batch, queries_at + first_query + W * ROWS, head, 0]
    lse_base = lse_ptr + (batch * work.heads + head).to(gl.int64) * bounds.seqlen_q + queries_at
    inside = row < own.seqlen_q
    if F.left or F.right or F.intervals or F.block_q or C.packed:
        nothing += gl.sum(acc * 0.0, 1)
    left = own.seqlen_q - first_query - W * ROWS
    out = out_smem.index(W)
    _finish(
        acc,
        row_sum,
        row_max,
        lse_base + row,
        inside,
        out,
        descriptors[3],
        place_out,
        left,
        origins,
        C,
    )
    if BLOCK_V > 128:
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(place_q), count=1)
    return taken, nothing, following
