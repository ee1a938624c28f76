"""Helpers of the fused backward kernel for Hopper GPUs: barriers, masks, operands,
dQ's additions, results.

D head dimension. A tile is 64 queries; a block of keys is 128, 64 for each of two
warpgroups (WG), unless D = 256.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..portable.dropout_rng import load_stream
from .alibi import load_slope
from .assembly import capped, exp2_few, noted, opaque
from .backward_schedule import BAND, BLOCK_K, BLOCK_Q, work_of
from .dropout_rng import draws_of, keep_scale
from .triton_compat import reinterpreted

HALF = gl.constexpr(64)
# Hardware barriers (Triton uses the low ones): between warpgroups, one a stage of a ring,
# one a pair of K and V.
BETWEEN = gl.constexpr(7)
RING = gl.constexpr(11)
LOADED = gl.constexpr(14)
# What `hide` leaves of softcap's tanh: its weight is 0, and its square finite, so that its
# derivative is 0, too.
HIDDEN_TANH = gl.constexpr(-1e18)


@gluon.jit
def meet():
    """Wait until both consumer warpgroups have arrived here."""
    gl.inline_asm_elementwise(
        "bar.sync 6, 256; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def signal(number):
    """Let the other warpgroup pass one `await_signal(number)`, which must happen before the
    next `signal(number)`."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.u32 $0, 0;",
        "=r,r,~{memory}",
        [number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def await_signal(number):
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.u32 $0, 0;",
        "=r,r,~{memory}",
        [number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def barrier_if(OP: gl.constexpr, THREADS: gl.constexpr, number, real):
    """If `real`, arrive at hardware barrier `number` of THREADS threads and, if OP is
    "sync" (not "arrive"), wait."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; "
        "@p bar." + OP + " $1, " + THREADS + "; mov.u32 $0, 0; }",
        "=r,r,r,~{memory}", [number, real.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def release(number, real):
    """If `real`, tell the producer warp by hardware barrier `number` that this
    warpgroup has read a buffer."""
    # 288: two warpgroups and a warp. An mbarrier would do, but Triton puts two
    # barriers around an arrival.
    barrier_if("arrive", "288", number, real)


@gluon.jit
def await_release(number, real):
    """If `real`, wait until both consumer warpgroups have called `release(number, True)`."""
    barrier_if("sync", "288", number, real)


@gluon.jit
def shared_stored():
    """Make this thread's stores to shared memory visible, after a barrier, to tensor
    cores and the TMA unit."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.shared::cta; mov.u32 $0, 0;",
        "=r,~{memory}",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def exponent(s, rows, call, C: gl.constexpr):
    """Return log2 of the weights P^T, (keys, queries), from s = K Q^T; with C.softcap tanh(scale s
    / softcap), from which `weights_of` computes the weights. rows: 64 base-2 log-sum-exps, then 64
    deltas, in shared memory."""
    if C.softcap:
        x = capped(s, call.scale_log2)
    else:
        lse2 = rows.slice(0, BLOCK_Q).load(gl.SliceLayout(0, s.type.layout))
        x = s * call.scale_log2 - lse2[None, :]
    return x


@gluon.jit
def weights_of(x, rows, call, C: gl.constexpr):
    """Return (P, factor by which dP - delta gives dS: P, times softcap's derivative).
    x, rows: see `exponent`."""
    if C.softcap:
        lse2 = rows.slice(0, BLOCK_Q).load(gl.SliceLayout(0, x.type.layout))
        p = exp2_few(x * call.scale_log2[8] - lse2[None, :])
        slope = p - p * (x * x)
    else:
        p = exp2_few(x)
        slope = p
    return p, slope


@gluon.jit
def gradient_scale(call, C: gl.constexpr):
    """Return the softmax scale, by which the complete sums of dQ and dK are multiplied."""
    if C.softcap:
        scale_log2 = call.scale_log2[0] * call.scale_log2[8]
    else:
        scale_log2 = call.scale_log2
    return scale_log2 * 0.6931471805599453


@gluon.jit
def hide_outside(s, query, key, bounds, C: gl.constexpr):
    """Set the scores s of pairs outside of the window and of keys past Sk to -inf; with
    C.softcap s is the tanh, and gets -1e18. query, key: indices that broadcast to s. C:
    may also be Features."""
    HIDDEN: gl.constexpr = HIDDEN_TANH if C.softcap else float("-inf")
    s = gl.where(key < bounds.seqlen_k, s, HIDDEN)
    if C.left:
        s = gl.where(key >= query + bounds.left, s, HIDDEN)
    if C.right:
        s = gl.where(key <= query + bounds.right, s, HIDDEN)
    return s


@gluon.jit
def hide(s, tile, key, position, bounds, masks, C: gl.constexpr, layout: gl.constexpr):
    """Set the scores s (keys, queries) of masked pairs as `hide_outside` does. tile: the query
    tile's number; key, position: the keys' indices and positions (keys, 1); bounds: Walk.bounds."""
    HIDDEN: gl.constexpr = HIDDEN_TANH if C.softcap else float("-inf")
    query = (
        opaque(tile * BLOCK_Q) + gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(0, layout))[None, :]
    )
    s = hide_outside(s, query, key, bounds, C)
    if C.intervals:
        mask_ptr = masks.queries
        plane = masks.plane
        real = query < bounds.seqlen_q
        if C.intervals == 1:
            s = gl.where(position >= gl.load(mask_ptr + query, mask=real, other=0), s, HIDDEN)
            s = gl.where(
                position < gl.load(mask_ptr + plane + query, mask=real, other=0), s, HIDDEN
            )
        else:
            inside = position >= gl.load(mask_ptr + query, mask=real, other=0)
            inside = inside & (position < gl.load(mask_ptr + plane + query, mask=real, other=0))
            also = position >= gl.load(mask_ptr + 5 * plane + query, mask=real, other=0)
            also = also & (position < gl.load(mask_ptr + 6 * plane + query, mask=real, other=0))
            s = gl.where(inside | also, s, HIDDEN)
    return s


@gluon.jit
def left_keys(x, never, WG: gl.constexpr, D: gl.constexpr):
    """Return warpgroup WG's half, (64, D), of a shared-memory buffer of 128 keys (K or V). never:
    the buffer's index in x, to be computed at run time even if it is always 0, else the compiler
    holds dozens of addresses in registers."""
    return x.index(never).reshape([BLOCK_K, D]).slice(WG * HALF, HALF)


@gluon.jit
def left_transposed(x, never, WG: gl.constexpr, D: gl.constexpr):
    """Return K^T (64 dimensions, 128 keys) in shared memory; at D = 128 warpgroup WG's
    half. never: see left_keys."""
    if D == 64:
        t = x.index(never).reshape([BLOCK_K, D]).permute((1, 0))
    else:
        t = x.index(never).reshape([BLOCK_K, D]).slice(WG * HALF, HALF, dim=1).permute((1, 0))
    return t


@gluon.jit
def in_register_order(dq, PART: gl.constexpr):
    """Flatten half a tile of dQ^T, (64, PART), in the order in which registers hold it,
    so that no data moves."""
    return dq.reshape([4, 2, 8, PART // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([HALF * PART])


@gluon.jit
def add_directly(pointer, dq, real, PART: gl.constexpr):
    """If `real`, add dq, half a tile of dQ^T (64, PART), to global memory at
    `pointer` by atomic additions."""
    flat = in_register_order(dq, PART)
    place = gl.arange(0, HALF * PART, layout=flat.type.layout)
    gl.atomic_add(pointer + place, flat, mask=(place >= 0) & real, sem="relaxed")


@builtin
def reduce_by_copy(desc, coord, src, _semantic=None):
    """Add the shared-memory tile `src` to global memory by TMA, at `coord` of a
    descriptor; Gluon lacks this."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle
    )


@gluon.jit
def add_by_copy(desc, staging, row, dq, PART: gl.constexpr):
    """Add dq (64, PART), half a tile of dQ^T, to the rows of workspace desc (n, 32)
    from `row` on, by TMA."""
    tma.store_wait(0)
    staging.store(in_register_order(dq, PART).reshape([2 * PART, 32]))
    shared_stored()
    reduce_by_copy(desc, [row, 0], staging)


@gluon.jit
def has_nan(dk, dv):
    """Return 1 if dk or dv holds a NaN, else 0."""
    return gl.max(gl.max(gl.where((dk != dk) | (dv != dv), 1, 0), 1), 0)


@gluon.jit
def store_keys(
    pointer, stride, value, left, staging, WG: gl.constexpr, D: gl.constexpr, HEAD_DIM: gl.constexpr
):
    """Store `value`, warpgroup WG's 64 rows of a 128-row block of dK or dV. pointer: to the block's
    first row; left: how many of its rows exist; HEAD_DIM: how many columns do. staging: shared
    memory, used unless D is 64."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    row = WG * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, D, layout=gl.SliceLayout(0, layout))[None, :]
    value = value.to(pointer.dtype.element_ty)
    if D == 64:
        value = gl.convert_layout(value, layout)
    else:
        SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        place = reinterpreted(staging, pointer.dtype.element_ty, [HALF, D], SWIZZLED)
        place.store(value)
        value = place.load(layout)
    real = row < left
    if HEAD_DIM < D:
        real = real & (column < HEAD_DIM)
    gl.store(pointer + row.to(gl.int64) * stride + column, value, mask=real)


@gluon.jit
def store_part(pointer, value, D: gl.constexpr):
    """Store `value`, float32 of 64 keys (64, D), to 64 D numbers from `pointer` on, in the order of
    `in_register_order` (backward_rows.sum_of_parts reads them)."""
    flat = in_register_order(value, D)
    gl.store(pointer + gl.arange(0, HALF * D, layout=flat.type.layout), flat)


@gluon.jit
def noted_stride(notes, PLACE: gl.constexpr, C: gl.constexpr):
    """Load a stride of dK or dV from index PLACE of `notes`, shared int64 words that
    backward_kernel stored. If C.aligned the word is stride / 8, and multiplying by 8 here shows the
    compiler that 8 divides the stride."""
    stride = noted(notes, PLACE)
    if C.aligned:
        stride = stride * 8
    return stride


@gluon.jit
def threshold_of(notes):
    """Load dropout's 16-bit threshold from `notes`, shared int64 words that
    backward_kernel stored."""
    return noted(notes, 10).to(gl.int32)


@gluon.jit
def item_draws(member, walk, masks, key, first_head, call, C: gl.constexpr):
    """Return (Philox key, query counter, key counters), from which dropout's random numbers of a
    block of keys come, for query head `member` of the group. key: the keys' indices (keys, 1);
    rest: from backward_schedule.work_of."""
    stream = load_stream(masks.queries, walk.sequence, first_head % call.heads + member)
    return draws_of(stream, key, walk.first_position)


@gluon.jit
def item_slope(member, walk, masks, first_head, call, notes, C: gl.constexpr):
    """Return the ALiBi slope, times log2(e), of query head `member` of the group.
    Arguments: see item_draws."""
    sequences = noted(notes, 9).to(gl.int32)
    head = first_head % call.heads + member
    return load_slope(
        masks.queries, noted(notes, 10).to(gl.int32), walk.sequence, sequences, head, C.packed
    )


@gluon.jit
def store_results(
    dk, dv, item, call, notes, slot, staging, WG: gl.constexpr, D: gl.constexpr, C: gl.constexpr
):
    """Scale dK and dV of 64 keys, those of warpgroup WG in a work item, and store them.
    item: the item's number; slot: see work_of.

    If C.split > 1 they are sums over a part of the query heads, stored for
    backward_rows.sum_of_parts. Else they are the results; where pairs may be masked, a flag is
    stored with them that says whether they contain a NaN.
    """
    walk, _masks, first_key, head_place = work_of(opaque(item), call, notes, C, slot)
    batch = head_place // call.heads
    kv_head = head_place % call.heads // C.group
    tile = walk.item_tile if C.packed else first_key // BLOCK_K
    place = ((batch * (call.heads // C.group) + kv_head) * call.key_tiles + tile) * 2 + WG
    if C.dropout:
        dk = dk * keep_scale(threshold_of(notes))
        dv = dv * keep_scale(threshold_of(notes))
    dk = dk * gradient_scale(call, C)
    if C.split > 1:
        part = call.dk + place.to(gl.int64) * (2 * HALF * D)
        store_part(part, dk, D)
        store_part(part + HALF * D, dv, D)
    else:
        store_whole(dk, dv, walk, first_key, batch, kv_head, place, call, notes, staging, WG, D, C)


@gluon.jit
def store_whole(
    dk, dv, walk, first_key, batch, kv_head, place, call, notes, staging, WG: gl.constexpr,
    D: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Store dK and dV as the call's results, and the flag of these 64 keys at
    `place`: see store_results."""
    if C.left or C.right or C.kind != BAND or C.packed:
        gl.store(call.flags + place, has_nan(dk, dv))
    left = walk.bounds.seqlen_k - first_key
    first_key += walk.keys_at
    stride = noted_stride(notes, 1, C)
    base = (
        call.dk
        + batch * noted_stride(notes, 0, C)
        + first_key * stride
        + kv_head * noted_stride(notes, 2, C)
    )
    store_keys(base, stride, dk, left, staging, WG, D, C.head_dim)
    stride = noted_stride(notes, 4, C)
    base = (
        call.dv
        + batch * noted_stride(notes, 3, C)
        + first_key * stride
        + kv_head * noted_stride(notes, 5, C)
    )
    store_keys(base, stride, dv, left, staging, WG, D, C.head_dim)
