"""The forward kernel for sm_90: a warp that fetches and warpgroups that compute, over a
list of tiles of queries.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension
(of values Dv).
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...masks import AnyMask, Mask, Sequences
from ...options import Options
from .. import Call
from ..portable import launch as portable
from ..portable.launch import Launch, ceil_div, features_of, multiprocessors, padded
from ..portable.tiles import Bounds
from .descriptors import descriptor
from .dropout_rng import with_changes
from .forward_masks import MaskTables
from .forward_recompute_nonfinite import note_origin
from .forward_schedule import Work, divisor
from .forward_tiles import forward_tile
from .forward_warps import consume, produce
from .launch import GluonLaunch
from .sequences import slots
from .softcap import scale_of

# How much of the L2 cache (50 MB on an H100, 60 MB on an H200) the keys and values of one
# section of heads may fill.
L2_BYTES = 24 << 20
NOT_SPECIALISED = [
    "heads", "total", "section", "tiles", "block_m", "block_s", "section_m", "section_s", "heads_m",
    "heads_s",
    "seqlen_q", "seqlen_k", "band_left", "band_right", "stride_tb", "stride_th",
    "stride_tr", "stride_rows", "plane",
]  # fmt: skip


class Constants(NamedTuple):
    """The compile-time constants of the forward kernel, besides those of the mask
    (portable.launch.Features)."""

    consumers: int  # this and the next seven: of the ForwardTile
    rows: int
    block_k: int
    stages: int
    q_stages: int
    turns: bool
    tight: bool
    registers: int
    head_dim: int
    block_d: int  # D padded to a power of two
    value_dim: int  # Dv
    block_v: int  # Dv padded to a power of two
    group: int  # H / K
    tiles: int  # in a block of a block-sparse mask
    paired: bool  # tiles of queries come in pairs
    packed: bool = False  # sequences are packed
    bounded: bool = False  # a softcap bounds the exponents (_is_bounded)
    counted: bool = False  # programs take the next tile from a counter


@gluon.jit(do_not_specialize=NOT_SPECIALISED)
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, rows_ptr, table_ptr, list_ptr, stride_tb, stride_th,
    stride_tr,
    stride_rows, plane, heads, total, section, tiles, block_m, block_s, section_m, section_s,
    heads_m, heads_s,
    seqlen_q, seqlen_k, band_left, band_right, scale, q_ptr, k_ptr, v_ptr, out_ptr, counter,
    F: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Kernel: one program computes out and lse of one or more tiles of queries. *_desc: TMA
    descriptors; rows_ptr to plane: from mask_arguments; heads to heads_s: a Work; band_*: the
    window's sides; scale: from softcap.scale_of."""
    DTYPE: gl.constexpr = q_desc.dtype
    descriptors = (q_desc, k_desc, v_desc, out_desc)
    q_smem = gl.allocate_shared_memory(
        DTYPE, [C.q_stages * C.consumers, 1, C.rows, 1, C.block_d], q_desc.layout
    )
    k_smem = gl.allocate_shared_memory(DTYPE, [C.stages, 1, C.block_k, 1, C.block_d], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [C.stages, 1, C.block_k, 1, C.block_v], v_desc.layout)
    if C.block_v > 128:  # there is room for one of the two: see forward_warps.consume
        out_smem = q_smem
    else:
        out_smem = gl.allocate_shared_memory(
            DTYPE, [C.consumers, 1, C.rows, 1, C.block_v], out_desc.layout
        )
    buffers = (q_smem, k_smem, v_smem, out_smem)
    q_full = gl.allocate_shared_memory(
        gl.int64, [C.q_stages * C.consumers, 1], mbarrier.MBarrierLayout()
    )
    q_empty = gl.allocate_shared_memory(
        gl.int64, [C.q_stages * C.consumers, 1], mbarrier.MBarrierLayout()
    )
    k_full = gl.allocate_shared_memory(gl.int64, [C.stages, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [C.stages, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [C.stages, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [C.stages, 1], mbarrier.MBarrierLayout())
    Q_TILES: gl.constexpr = C.q_stages * C.consumers
    STAGES: gl.constexpr = C.stages
    for i in gl.static_range(Q_TILES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=C.consumers)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=C.consumers)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    work = Work(
        heads, total, section, tiles, block_m, block_s, section_m, section_s, heads_m, heads_s
    )
    bounds = Bounds(seqlen_q, seqlen_k, band_left, band_right)
    mask = MaskTables(table_ptr, stride_tb, stride_th, stride_tr, stride_rows, plane)
    if F.left or F.right or F.intervals or F.block_q or C.packed:
        # Rarely read, so it lies in shared memory: every argument of a worker is a register
        # for the whole kernel.
        origins = gl.allocate_shared_memory(
            gl.int64, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
        note_origin(origins, 0, q_ptr, q_desc.strides)
        note_origin(origins, 4, k_ptr, k_desc.strides)
        note_origin(origins, 8, v_ptr, v_desc.strides)
        note_origin(origins, 12, out_ptr, out_desc.strides)
    else:
        origins = q_full
    if C.counted:  # an item beside each tile of queries in flight: sequence, head, first query
        handed = gl.allocate_shared_memory(
            gl.int32, [3 * Q_TILES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
    else:
        handed = q_full
    fetch = (descriptors, buffers, barriers, work, bounds, mask, list_ptr, handed, counter)
    compute = (
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
        handed,
    )
    # Constants stay constants only where they are written out as arguments.
    if C.consumers == 1:
        gl.warp_specialize([(consume, (0, compute, F, C)), (produce, (fetch, F, C))], [1], [24])
    elif C.consumers == 2:
        gl.warp_specialize(
            [
                (consume, (0, compute, F, C)),
                (consume, (1, compute, F, C)),
                (produce, (fetch, F, C)),
            ],
            [4, 1],
            [C.registers, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, compute, F, C)),
                (consume, (1, compute, F, C)),
                (consume, (2, compute, F, C)),
                (produce, (fetch, F, C)),
            ],
            [4, 4, 1],
            [C.registers, C.registers, 24],
        )


@triton.jit
def clear_kernel(counter_ptr):
    """Set the counter of a forward's tiles to 0."""
    tl.store(counter_ptr, 0)


def forward_launches(call: Call, out: torch.Tensor, lse: torch.Tensor) -> tuple[Launch, ...]:
    """Return the launches that fill out (B, Sq, H, Dv) and lse (B, H, Sq) of a call."""
    q, k, v, options = call
    tile = forward_tile(q, k, options)
    packed = options.mask if isinstance(options.mask, Sequences) else None
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k = k.shape[1]
    features = features_of(options)
    mask = with_changes(mask_arguments(options.mask, lse), 0, 6, options)
    value_dim = v.shape[3]
    block_d, block_v = padded(head_dim), padded(value_dim)
    tiles, keys_together = ceil_div(seqlen_q, tile.consumers * tile.rows), seqlen_k
    if packed is not None:
        tiles = slots(seqlen_q, packed.number, tile.consumers * tile.rows)
        keys_together = ceil_div(seqlen_k, packed.number)
    group = heads // k.shape[2]
    paired = (
        tile.paired
        and features.right
        and not (features.left or features.intervals or features.block_q)
    )
    paired = paired and packed is None
    section = 1
    if paired:
        section = (tiles + 1) // 2
    elif features.right or features.intervals or packed is not None:
        section = section_of(
            batch * heads, max(1, L2_BYTES // (4 * keys_together * head_dim)) * group
        )
    divisors = (*divisor(tiles * section), *divisor(section), *divisor(heads))
    total = batch * heads * (section if paired else tiles)
    programs = min(total, tile.programs * multiprocessors(q.device)) if tile.programs else total
    (box_q, box_k), (box_out, box_v) = (
        ((1, tile.rows, 1, width), (1, tile.block_k, 1, width)) for width in (block_d, block_v)
    )
    bounded = _is_bounded(q, options)
    # Where tiles are uneven, the next one is whoever's comes to it first.
    counted = (packed is not None or features.intervals > 0) and tile.programs > 0
    counter = torch.empty(1, dtype=torch.int32, device=q.device) if counted else lse
    constants = Constants(
        tile.consumers, tile.rows, tile.block_k, tile.stages, tile.q_stages, tile.turns, tile.tight,
        tile.registers, head_dim, block_d, value_dim, block_v, group,
        max(1, features.block_k // tile.block_k), paired, packed is not None, bounded, counted,
    )  # fmt: skip
    # A kernel, as a recorded call (launch_cache) repeats allocations and launches alone.
    clear = Launch(clear_kernel, (1,), (counter,), constants={}, options={"num_warps": 1})
    attend = GluonLaunch(
        kernel=forward_kernel,
        grid=(programs,),
        args=(
            descriptor(q, box_q), descriptor(k, box_k), descriptor(v, box_v),
            descriptor(out, box_out),
            lse, *mask, heads, total, section, tiles, *divisors,
            seqlen_q, seqlen_k, options.left or 0, options.right or 0, scale_of(options, bounded),
            q, k, v, out, counter,
        ),
        constants={"F": features, "C": constants},
        options={"num_warps": 4, "maxnreg": tile.cap} if tile.cap else {"num_warps": 4},
    )  # fmt: skip
    return (clear, attend) if counted else (attend,)


def mask_arguments(mask: AnyMask | None, unused: torch.Tensor) -> tuple[Any, ...]:
    """Return Mask.queries, the table of tiles, the list of blocks, then the table's strides by
    batch row, head and tile, and the strides of Mask.queries by batch row and row. unused: a tensor
    in the place of absent ones."""
    # Of a Mask the list is Mask.keys, so that the kernels of other calls have no argument
    # more. Of Sequences: where their keys end is the table, where their queries end the list,
    # and the last number is N.
    queries, plane, stride_rows, positions, _ = portable.mask_arguments(mask, unused)
    table = portable.table_of(mask, unused, "forward")
    listed = positions if isinstance(mask, Mask) else table.blocks
    return (queries, table.rows, listed, table.batch, table.head, table.row, stride_rows, plane)


def _is_bounded(q: torch.Tensor, options: Options) -> bool:
    """Does a softcap bound the exponents of 2, so that no row's maximum need be looked for?"""
    # bfloat16 and float32 hold 2^-126 to 2^127. With softcap b in base 2 and m = min(b, 100 - b)
    # weights are from 2^(-b - m) to 2^(b - m): up to softcap 50 from 2^-100 to 2^45, up to 34 none
    # above 1. No precision is lost, and sums of a million values up to 2^60 are not too large.
    # float16 holds no such weights.
    return q.dtype == torch.bfloat16 and 0 < options.softcap <= 50


@cache
def section_of(pairs: int, most: int) -> int:
    """Return the largest divisor of `pairs`, the number of (batch row, head) pairs,
    that is at most `most`."""
    return max(n for n in range(1, min(pairs, most) + 1) if pairs % n == 0)
