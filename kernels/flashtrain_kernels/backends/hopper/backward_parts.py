"""Helpers of the fused backward kernel for Hopper GPUs: barriers, masks, operands, dQ's additions, results.

D head dimension. A tile is 64 queries; an item is 128 keys, 64 for each of two warpgroups (WG).
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
# Hardware barriers (Triton uses the low ones): between warpgroups, one a stage of a ring, one a pair of K and V.
BETWEEN = gl.constexpr(7)
RING = gl.constexpr(11)
LOADED = gl.constexpr(14)
# What `hide` leaves of softcap's tanh: its weight is 0, and its square finite, so that its derivative is 0, too.
_HIDDEN = gl.constexpr(-1e18)


@gluon.jit
def meet():
    """Wait until both consumer warpgroups have arrived here."""
    gl.inline_asm_elementwise(
        "bar.sync 6, 256; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def signal(number):
    """Let the other warpgroup pass its `await_signal(number)`; that must happen before the next `signal(number)`."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.u32 $0, 0;", "=r,r,~{memory}", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_signal(number):
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.u32 $0, 0;", "=r,r,~{memory}", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def barrier_if(OP: gl.constexpr, THREADS: gl.constexpr, number, real):
    """If `real`, use hardware barrier `number` of THREADS threads. OP "sync": arrive, wait; "arrive": arrive only."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p bar." + OP + " $1, " + THREADS + "; mov.u32 $0, 0; }",
        "=r,r,r,~{memory}", [number, real.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def release(number, real):
    """If `real`, tell the producer warp by hardware barrier `number` that this warpgroup has read a ring's buffer."""
    # 288: two warpgroups and a warp. An mbarrier would do, but Triton puts two barriers around an arrival.
    barrier_if("arrive", "288", number, real)


@gluon.jit
def await_release(number, real):
    """If `real`, wait until both consumer warpgroups have called `release(number, True)`."""
    barrier_if("sync", "288", number, real)


@gluon.jit
def shared_stored():
    """Make this thread's stores to shared memory visible, after a barrier, to tensor cores and the TMA unit."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.shared::cta; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def exponent(s, rows, call, C: gl.constexpr):
    """Return the weights' base-2 exponents for s = K Q^T (keys, queries); with C.softcap tanh(scale s / softcap), from
    which `weights_of` makes weights. rows: in shared memory the 64 queries' base-2 log-sum-exps, then their deltas."""
    if C.softcap:
        x = capped(s, call.scale_log2)
    else:
        lse2 = rows.slice(0, BLOCK_Q).load(gl.SliceLayout(0, s.type.layout))
        x = s * call.scale_log2 - lse2[None, :]
    return x


@gluon.jit
def weights_of(x, rows, call, C: gl.constexpr):
    """Return (P, factor of dP - delta in dS: P, times softcap's derivative if any). x, rows: of `exponent`."""
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
    """Return the scale of the scores, by which complete sums of dQ and dK are multiplied."""
    if C.softcap:
        scale_log2 = call.scale_log2[0] * call.scale_log2[8]
    else:
        scale_log2 = call.scale_log2
    return scale_log2 * 0.6931471805599453


@gluon.jit
def hide(s, tile, key, position, bounds, masks, C: gl.constexpr, layout: gl.constexpr):
    """Set s (keys, queries of tile number tile) to -inf for masked pairs; with C.softcap (s: the tanh) to -1e18.
    key, position: indices and positions of the keys (keys, 1); bounds: Walk.bounds; masks: backward_schedule.Masks."""
    HIDDEN: gl.constexpr = _HIDDEN if C.softcap else float("-inf")
    query = opaque(tile * BLOCK_Q) + gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(0, layout))[None, :]
    s = gl.where(key < bounds.seqlen_k, s, HIDDEN)
    if C.left:
        s = gl.where(key >= query + bounds.left, s, HIDDEN)
    if C.right:
        s = gl.where(key <= query + bounds.right, s, HIDDEN)
    if C.intervals:
        mask_ptr = masks.queries
        plane = masks.plane
        real = query < bounds.seqlen_q
        if C.intervals == 1:
            s = gl.where(position >= gl.load(mask_ptr + query, mask=real, other=0), s, HIDDEN)
            s = gl.where(position < gl.load(mask_ptr + plane + query, mask=real, other=0), s, HIDDEN)
        else:
            inside = position >= gl.load(mask_ptr + query, mask=real, other=0)
            inside = inside & (position < gl.load(mask_ptr + plane + query, mask=real, other=0))
            also = position >= gl.load(mask_ptr + 5 * plane + query, mask=real, other=0)
            also = also & (position < gl.load(mask_ptr + 6 * plane + query, mask=real, other=0))
            s = gl.where(inside | also, s, HIDDEN)
    return s


@gluon.jit
def left_keys(x, never, WG: gl.constexpr, D: gl.constexpr):
    """Return warpgroup WG's 64 keys of K or V, (64, D), from x, buffers of 128 keys. never: the buffer's index, to be
    computed at run time even if always 0, or else the compiler holds dozens of addresses in registers."""
    return x.index(never).reshape([BLOCK_K, D]).slice(WG * HALF, HALF)


@gluon.jit
def left_transposed(x, never, WG: gl.constexpr, D: gl.constexpr):
    """Return K^T, 64 dimensions by 128 keys: all at D = 64, at D = 128 warpgroup WG's half. never: see left_keys."""
    if D == 64:
        t = x.index(never).reshape([BLOCK_K, D]).permute((1, 0))
    else:
        t = x.index(never).reshape([BLOCK_K, D]).slice(WG * HALF, HALF, dim=1).permute((1, 0))
    return t


@gluon.jit
def in_register_order(dq, PART: gl.constexpr):
    """Flatten half a tile of dQ^T (64, PART) in the order of the threads' registers, so that no data moves."""
    return dq.reshape([4, 2, 8, PART // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([HALF * PART])


@gluon.jit
def add_directly(pointer, dq, real, PART: gl.constexpr):
    """If `real`, add dq, half a tile of dQ^T (64, PART), to the workspace at `pointer` by atomics from registers."""
    flat = in_register_order(dq, PART)
    place = gl.arange(0, HALF * PART, layout=flat.type.layout)
    gl.atomic_add(pointer + place, flat, mask=(place >= 0) & real, sem="relaxed")


@builtin
def reduce_by_copy(desc, coord, src, _semantic=None):
    """Add a tile of shared memory to global memory at `coord` of a TMA descriptor (Gluon has no function for this)."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.jit
def add_by_copy(desc, staging, row, dq, PART: gl.constexpr):
    """Add dq, half a tile of dQ^T (64, PART), to rows [row, row + 2 * PART) of workspace desc, (n, 32), via staging."""
    tma.store_wait(0)
    staging.store(in_register_order(dq, PART).reshape([2 * PART, 32]))
    shared_stored()
    reduce_by_copy(desc, [row, 0], staging)


@gluon.jit
def has_nan(dk, dv):
    """Return 1 if dk or dv holds a NaN, else 0."""
    return gl.max(gl.max(gl.where((dk != dk) | (dv != dv), 1, 0), 1), 0)


@gluon.jit
def store_keys(pointer, stride, value, left, staging, WG: gl.constexpr, D: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Store `value`, rows WG * 64 and up of an item's dK or dV. pointer: the item's row 0; stride: between rows; left:
    how many of its rows exist; HEAD_DIM: how many columns do. staging: shared memory to reorder in if D is not 64."""
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
def noted_stride(notes, PLACE: gl.constexpr, C: gl.constexpr):
    """Load a stride of dK or dV. If C.aligned, `notes` holds stride / 8, and multiplying by 8 here lets the compiler
    see that the stride is divisible by 8. notes: shared int64 words that backward_kernel fills; PLACE: the index."""
    stride = noted(notes, PLACE)
    if C.aligned:
        stride = stride * 8
    return stride


@gluon.jit
def threshold_of(notes):
    """Load dropout's 16-bit threshold from the shared memory `notes` (see dropout_rng.with_changes)."""
    return noted(notes, 10).to(gl.int32)


@gluon.jit
def item_draws(member, walk, masks, key, first_head, call, C: gl.constexpr):
    """Return dropout's `draws_of` (Philox key, counter of queries, counters of keys) for query head `member` of the
    group and `key`, indices (keys, 1). walk, masks, first_head (head_place): from backward_schedule.work_of."""
    stream = load_stream(masks.queries, walk.sequence, first_head % call.heads + member)
    return draws_of(stream, key, walk.first_position)


@gluon.jit
def item_slope(member, walk, masks, first_head, call, notes, C: gl.constexpr):
    """Return the ALiBi slope (`load_slope`) of query head `member` of the group. Rest: see item_draws, noted_stride."""
    sequences = noted(notes, 9).to(gl.int32)
    head = first_head % call.heads + member
    return load_slope(masks.queries, noted(notes, 10).to(gl.int32), walk.sequence, sequences, head, C.packed)


@gluon.jit
def store_results(dk, dv, item, call, notes, staging, WG: gl.constexpr, D: gl.constexpr, C: gl.constexpr):
    """Scale and store dK and dV of warpgroup WG's 64 keys of an item (a number, see backward_schedule.work_of) and, if
    pairs may be masked, a flag: whether dK or dV has a NaN. notes, staging: see noted_stride, store_keys."""
    walk, _masks, first_key, head_place = work_of(opaque(item), call, notes, C)
    batch = head_place // call.heads
    kv_head = head_place % call.heads // C.group
    tile = walk.item_tile if C.packed else first_key // BLOCK_K
    if C.left or C.right or C.kind != BAND or C.packed:
        place = ((batch * (call.heads // C.group) + kv_head) * call.key_tiles + tile) * 2 + WG
        gl.store(call.flags + place, has_nan(dk, dv))
    left = walk.bounds.seqlen_k - first_key
    first_key += walk.keys_at
    stride = noted_stride(notes, 1, C)
    base = call.dk + batch * noted_stride(notes, 0, C) + first_key * stride + kv_head * noted_stride(notes, 2, C)
    if C.dropout:
        dk = dk * keep_scale(threshold_of(notes))
        dv = dv * keep_scale(threshold_of(notes))
    store_keys(base, stride, dk * gradient_scale(call, C), left, staging, WG, D, C.head_dim)
    stride = noted_stride(notes, 4, C)
    base = call.dv + batch * noted_stride(notes, 3, C) + first_key * stride + kv_head * noted_stride(notes, 5, C)
    store_keys(base, stride, dv, left, staging, WG, D, C.head_dim)
