"""The backward on Hopper GPUs: three launches, the second of which does the work, and at
D = 256 one more for dQ.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

from typing import Any

import torch
from torch import Tensor

from ...masks import BlockMask, Mask, Sequences
from ...options import Options
from .. import Call, Gradients
from ..portable.launch import (
    Launch,
    ceil_div,
    features_of,
    mask_arguments,
    multiprocessors,
    strides_of,
    table_of,
)
from ..portable.tile_table import width_of
from .backward_dq_d256 import ROWS, dq_kernel
from .backward_kernel import Choices, backward_kernel
from .backward_rows import FLAGS, finish_kernel, prepare_kernel
from .backward_schedule import BAND, BLOCK_K, BLOCK_Q, BLOCKS, PLAN
from .descriptors import descriptor, why_not, workspace
from .dropout_rng import keep_scale_of, why_not_change, with_changes
from .launch import GluonLaunch
from .sequences import slots
from .softcap import scale_of
from .triton_compat import backward_options

QUERIES, KEYS = BLOCK_Q.value, BLOCK_K.value
# The tiles that masks are planned for, by width: of dK and dV, before them those of a dQ apart.
PLANNED = {64: (QUERIES, KEYS), 128: (QUERIES, KEYS), 256: (ROWS.value, 64, QUERIES, 64)}
# Up to how many keys, and with how much of a workspace, programs have whole heads at D = 64: causal
# ones up to SHORT_KEYS, beyond which a queue of items is faster. How full the last round of heads
# must make the programs' time: whole heads save a quarter of a causal call, else some 7%.
WHOLE_KEYS, WHOLE_BYTES = 1024, 40 << 20
SHORT_KEYS, SHORT_FILL, FILL = 512, 0.85, 0.95
# From how many queries on dQ is computed a tile late at D = 128, as measured
# (kernels/dev/OPTIMISATION.md): the fewer tiles an item has, the more its longer first and last
# ones weigh. With a window, features need the registers.
LATE_QUERIES = 512
# Up to how many keys of a causal call at D = 64 the kernel `schedules_dynamically`: faster at 1,024
# keys, slower at 4,096 (kernels/dev/OPTIMISATION.md).
COUNTED_KEYS = 2048
# How many items the heads that are sorted together have at least (heads_together), about as
# many as run at once.
SORTED_ITEMS = 128
# Up to how many tiles of keys items are not sorted at D = 128.
UNSORTED_TILES = 4
# How many query heads an item has at most at D = 128 without a window, and what their parts
# of dK and dV may take.
ITEM_HEADS, PART_BYTES, PART_BYTES_OF_ITEM = 4, 256 << 20, 2 * KEYS * 128 * 4
# Of windows at D = 128 and of packed sequences, how many heads' items lie together.
WINDOW_HEADS, PACKED_HEADS = 8, {64: 16, 128: 8, 256: 8}
# And where dQ is added up in one order: with more, fewer items wait; with fewer, L2 serves more.
DETERMINISTIC_HEADS = 16


def serves_backward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Return None if the Hopper backward serves this call, else the reason why not."""
    mask = options.mask
    if not 64 <= q.shape[3] <= 256 or q.shape[3] % 8:
        return f"head dimension {q.shape[3]} is not a multiple of 8 from 64 to 256"
    if isinstance(mask, Sequences) and q.shape[0] != 1:
        return "packed sequences in a batch of more than one row"
    reason = why_not_change(q, k, options)
    if reason is not None:
        return reason
    if isinstance(mask, Mask) and mask.plan is not None:
        own = PLANNED[width_of(q.shape[3])]
        if mask.plan.blocks[-len(own) :] != own:
            return "the mask is planned for other tile sizes"
    if isinstance(mask, BlockMask) and (mask.block_size[0] < QUERIES or mask.block_size[1] < KEYS):
        return f"block masks only with blocks of at least {QUERIES} queries and {KEYS} keys"
    return why_not("q", q) or why_not("k", k) or why_not("v", v)


def choices(call: Call, gradients: tuple[Tensor, ...], split: int = 1) -> Choices:
    """Return the compile-time constants of the fused kernel for a call.

    Args:
        call: the call.
        gradients: (dq, dk, dv).
        split: the result of `splits_of_group`.
    """
    q, k, _, options = call
    mask, width = options.mask, width_of(q.shape[3])
    kind, tiles, intervals, key_positions, queries = BAND.value, 1, 0, False, q.shape[1]
    rich_window = options.left is not None and options.rich
    if isinstance(mask, Sequences):
        queries //= mask.number
    elif isinstance(mask, Mask):
        kind = PLAN.value
        intervals = 1 if mask.queries.shape[0] == 5 else 2
        key_positions = mask.keys is not None
    elif isinstance(mask, BlockMask):
        kind, tiles = BLOCKS.value, mask.block_size[0] // QUERIES
    return Choices(
        stages=3 if width <= 128 else 2,
        keys=keys_of_item(width),
        head_dim=q.shape[3],
        group=q.shape[2] // k.shape[2] // split,
        split=split,
        left=options.left is not None,
        right=options.right is not None,
        kind=kind,
        tiles=tiles,
        intervals=intervals,
        key_positions=key_positions,
        block_rows=mask.block_size[1] if isinstance(mask, BlockMask) else keys_of_item(width),
        aligned=all(
            number % 8 == 0 for x in gradients for number in (*x.stride()[:3], x.data_ptr() // 2)
        ),
        whole=has_whole_heads(q, k, options),
        counted=split == 1 and schedules_dynamically(q, k, options),
        late=width == 128 and kind == BAND.value and queries >= LATE_QUERIES and not rich_window,
        packed=isinstance(mask, Sequences),
        softcap=options.softcap > 0,
        dropout=options.dropout_p > 0,
        alibi=options.alibi_slopes is not None,
        deterministic=width <= 128
        and is_deterministic(options)
        and not has_whole_heads(q, k, options),
    )


def is_deterministic(options: Options) -> bool:
    """Return whether the same call must give the same bits every time, by its own
    option or torch's setting."""
    return options.deterministic or torch.are_deterministic_algorithms_enabled()


def why_not_deterministic(q: Tensor, options: Options) -> str | None:
    """Return None if dQ is added up in a fixed order or can be
    (backward_deterministic.py), else the reason."""
    if q.shape[3] > 128:  # it is not added up
        return None
    # A table tells its tiles, not who else visits them.
    if isinstance(options.mask, (Mask, BlockMask)):
        return "not deterministic with a mask: dQ is added up in any order"
    if options.left is not None and options.right is not None and options.left > options.right:
        return "not deterministic with a window in which no query sees a key"
    return None


def has_whole_heads(q: Tensor, k: Tensor, options: Options) -> bool:
    """Return whether each program of the fused kernel takes all keys of a head, so that it alone
    computes that head's dQ. Every query must see the first keys, heads must divide about evenly
    among programs, workspaces must fit L2."""
    longest = WHOLE_KEYS if options.right is None else SHORT_KEYS
    if (
        q.shape[3] != 64
        or q.shape[2] != k.shape[2]
        or not 0 < k.shape[1] <= longest
        or 0 in q.shape
    ):
        return False
    if (
        options.mask is not None
        or options.left is not None
        or (options.right or 0) < 0
        or options.bias is not None
    ):
        return False
    heads, programs = q.shape[0] * q.shape[2], multiprocessors(q.device)
    fill = SHORT_FILL if options.right is not None and k.shape[1] <= SHORT_KEYS else FILL
    workspace_bytes = programs * tiles_of_queries(q.shape[1], options) * QUERIES * 64 * 4
    return heads >= fill * programs * ceil_div(heads, programs) and workspace_bytes <= WHOLE_BYTES


def schedules_dynamically(q: Tensor, k: Tensor, options: Options) -> bool:
    """Return whether the fused kernel's programs are persistent and take their next work item from
    a shared counter (dynamic persistent scheduling): at D = 64, where items are short and differ in
    length, so that K, V, Q and dO of the next item should be fetched while one ends."""
    if (
        q.shape[3] != 64
        or options.rich
        or is_deterministic(options)
        or has_whole_heads(q, k, options)
    ):
        return False  # what changes scores takes the registers that this needs
    causal = options.mask is None and options.right is not None and options.left is None
    return isinstance(options.mask, Sequences) or (causal and k.shape[1] <= COUNTED_KEYS)


def keys_of_item(width: int) -> int:
    """Return the number of keys of a work item: those that a program of the fused kernel computes
    dK and dV of at a time. width: D, padded to 64, 128 or 256."""
    return KEYS if width <= 128 else KEYS // 2


def splits_of_group(items: int, q: Tensor, k: Tensor, options: Options) -> int:
    """Return into how many work items to split the query heads that share a block of keys;
    each item then computes a part of the block's dK and dV. 1: no split.

    With few key/value heads, unsplit items would leave multiprocessors idle. There should be an
    item for each multiprocessor, or two if a causal mask or packed sequences make items uneven. At
    D = 128 an item should also have at most ITEM_HEADS query heads, if all parts take at most
    PART_BYTES; items of even length are not split for this into single query heads.

    Args:
        items: number of work items without splitting.
        q, k, options: the call's. q (B, Sq, H, D), k (B, Sk, K, D).
    """
    group = q.shape[2] // k.shape[2]
    if q.shape[3] > 128 or isinstance(options.mask, (Mask, BlockMask)):
        return 1
    uneven = options.right is not None or options.mask is not None
    enough = 0.95 * (2 if uneven else 1) * multiprocessors(q.device)
    divisors = [n for n in range(1, group + 1) if group % n == 0]
    least = 1
    if q.shape[3] > 64 and options.left is None and options.mask is None:
        fewer = next(n for n in divisors if group // n <= ITEM_HEADS)
        small = fewer * items * PART_BYTES_OF_ITEM <= PART_BYTES
        least = fewer if small and (uneven or group // fewer > 1) else 1
    return next((n for n in divisors if n >= least and items * n >= enough), group)


def tiles_of_queries(seqlen_q: int, options: Options) -> int:
    """Return how many tiles of 64 queries a head's workspaces hold; with a BlockMask,
    enough for whole blocks."""
    block = (
        max(QUERIES, options.mask.block_size[0]) if isinstance(options.mask, BlockMask) else QUERIES
    )
    return ceil_div(seqlen_q, block) * (block // QUERIES)


def heads_together(key_tiles: int, all_heads: int, width: int, options: Options) -> int:
    """Return the size of the groups of key/value heads whose work items run in one order: all
    items of the first block of keys, then those of the second, and so on.

    Below a causal mask the first blocks have most to do, and the last items to start should be
    short. A group has about SORTED_ITEMS items, one for each multiprocessor, and not many more,
    because its heads share the second-level cache. Its size divides all_heads, because a smaller
    last group would end with long items; the number of groups is even if possible, as a group that
    starts with long items follows one that ends with short ones.

    Args:
        key_tiles: work items (blocks of keys) of a head.
        all_heads: key/value heads of the whole batch, B K.
        width: D, padded: 64, 128 or 256.
        options: the call's; only window and mask are read.
    """
    if isinstance(options.mask, Sequences):
        return PACKED_HEADS[width]
    if options.left is not None and options.right is not None and width == 128:
        return WINDOW_HEADS
    if (
        options.right is None
        or options.left is not None
        or (width == 128 and key_tiles <= UNSORTED_TILES)
    ):
        return 1
    least = min(ceil_div(SORTED_ITEMS, key_tiles), all_heads)
    divisors = [heads for heads in range(least, all_heads + 1) if all_heads % heads == 0]
    return next((heads for heads in divisors if all_heads // heads % 2 == 0), divisors[0])


def is_queued(constants: Choices, width: int) -> bool:
    """Return whether each work item is a program of its own, the longest first, which the GPU
    starts when another ends. Else there is one program a multiprocessor, which takes every n-th
    item, or the next one (`schedules_dynamically`)."""
    causal = constants.kind == BAND.value and constants.right and not constants.left
    uneven = (causal or constants.packed or constants.intervals > 0) and not (
        constants.whole or constants.counted
    )
    return width != 64 or constants.deterministic or uneven


def backward_launches(call: Call, gradients: Gradients) -> tuple[Launch, ...]:
    """Return the launches of a backward, in order, with new workspaces: the statistics of queries,
    the fused kernel, dQ at D = 256, and finish_kernel, which stores dQ, recomputes tiles with NaN
    and sums up parts. The last one may have an empty grid."""
    q, k, v, options = call
    dout, dlse, out, lse, dq, dk, dv, _ = gradients
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    width = width_of(head_dim)
    keys = keys_of_item(width)
    query_tiles, wide_tiles = tiles_of_queries(seqlen_q, options), ceil_div(seqlen_q, ROWS.value)
    key_tiles = ceil_div(seqlen_k, keys)
    packed = options.mask if isinstance(options.mask, Sequences) else None
    if packed is not None:
        query_tiles = slots(seqlen_q, packed.number, QUERIES)
        wide_tiles = slots(seqlen_q, packed.number, ROWS.value)
        key_tiles = slots(seqlen_k, packed.number, keys)
    places = batch * heads * query_tiles
    items = key_tiles * batch * kv_heads
    split = splits_of_group(items, q, k, options)
    items, all_heads = items * split, batch * kv_heads * split
    constants = choices(call, (dq, dk, dv), split)
    stored = constants.whole or width == 256  # dQ, in its dtype, before the last kernel
    # In one order, no program may have two items: a later one might wait for a
    # program that has not begun.
    programs = items if is_queued(constants, width) else min(multiprocessors(q.device), items)
    masked = constants.left or constants.right or constants.kind != BAND.value or packed is not None
    # Tiles of queries' statistics; dQ in float32; does a NaN come out for 64 keys
    # (or a tile of queries)?
    rows = torch.empty(places * 2 * QUERIES, dtype=torch.float32, device=q.device)
    tiles = programs * query_tiles if constants.whole else 0 if stored else places
    work = torch.empty(tiles * QUERIES * width, dtype=torch.float32, device=q.device)
    halves = items * (keys // 64)
    # Of each 64 keys of an item, in float32: its parts of dK and dV.
    parts = torch.empty(
        halves * 2 * KEYS // 2 * width if split > 1 else 0, dtype=torch.float32, device=q.device
    )
    # Where nothing may be masked, or parts are summed up, no kernel reads or writes any.
    flags = work.view(torch.int32)
    counters = 1 + halves if constants.deterministic or constants.counted else 0
    if (masked and split == 1) or counters:
        flags = torch.empty(halves + places * stored + counters, dtype=torch.int32, device=q.device)
    scale_log2, finish_scale = scale_of(options), options.scale * keep_scale_of(options)
    warps = 4 if width <= 128 else 8
    mask = options.mask
    mask_given = with_changes(mask_arguments(mask, lse), 0, 2, options)
    of_queries, of_keys = (table_of(mask, lse, kernel) for kernel in ("dq", "dkdv"))
    cu_seqlens_q, sequences = (lse, 0) if packed is None else (packed.cu_seqlens_q, packed.number)
    prepare = Launch(
        kernel=prepare_kernel,
        grid=(places,),
        args=(
            out, dout, lse, lse if dlse is None else dlse, rows, work, flags, strides_of(out),
            strides_of(dout),
            heads, seqlen_q, query_tiles, halves, cu_seqlens_q, sequences,
        ),
        constants={
            "HAS_DLSE": dlse is not None, "RECOMPUTE": masked, "WHOLE": stored,
            "PACKED": constants.packed,
            "COUNTERS": counters > 0, "D": width, "HEAD_DIM": head_dim,
        },
        options={"num_warps": warps},
    )  # fmt: skip
    copied = width == 128 or constants.deterministic
    target: Any = workspace(work, (width, 32)) if copied else work
    box_q, box_k = (1, QUERIES, 1, width), (1, keys, 1, width)
    tensors = (
        descriptor(q, box_q),
        descriptor(k, box_k),
        descriptor(v, box_k),
        descriptor(dout, box_q),
    )
    together = 1 if constants.whole else heads_together(key_tiles, all_heads, width, options)
    if constants.deterministic:
        together = DETERMINISTIC_HEADS
    fused = GluonLaunch(
        kernel=backward_kernel,
        grid=(programs,),
        args=(
            *tensors, workspace(rows, (2 * QUERIES,)), target,
            *((parts, parts) if split > 1 else (dk, dv)), flags,
            *dk.stride()[:3], *dv.stride()[:3], scale_log2, heads, seqlen_q, seqlen_k,
            options.left or 0, options.right or 0, query_tiles, key_tiles, all_heads, together,
            *mask_given, *of_keys, dq, *dq.stride()[:3],
        ),
        constants={"D": width, "C": constants},
        options=backward_options(width, constants.intervals),
    )  # fmt: skip
    if stored:
        last_programs = ceil_div(halves + places, FLAGS.value) if masked else 0
    else:
        last_programs = places + halves // split if masked or split > 1 else places
    finish = Launch(
        kernel=finish_kernel,
        grid=(last_programs,),
        args=(
            work, rows, flags, parts, q, k, v, dout, dq, dk, dv,
            *map(strides_of, (q, k, v, dout, dq, dk, dv)),
            finish_scale, scale_log2, places, heads, seqlen_q, seqlen_k, options.left or 0,
            options.right or 0,
            query_tiles, key_tiles * (keys // 64), *mask_given, *of_queries, *of_keys,
        ),
        constants={
            "RECOMPUTE": masked, "WHOLE": stored, "PACKED": constants.packed,
            "GROUP": constants.group * split, "SPLIT": split, "F": features_of(options), "D": width,
            "HEAD_DIM": head_dim,
        },
        options={"num_warps": warps},
    )  # fmt: skip
    if width <= 128:
        return prepare, fused, finish
    dq_apart = GluonLaunch(
        kernel=dq_kernel,
        grid=(wide_tiles * batch * heads,),
        args=(
            *tensors, rows, dq, flags, halves,
            dq.stride(0), dq.stride(1) // (8 if constants.aligned else 1), dq.stride(2), scale_log2,
            heads, seqlen_q,
            seqlen_k, options.left or 0, options.right or 0, wide_tiles, query_tiles, batch * heads,
            heads_together(wide_tiles, batch * heads, width, options), *mask_given, *of_queries,
        ),
        constants={"F": features_of(options), "C": constants},
        options=backward_options(width, 0),
    )  # fmt: skip
    return prepare, fused, dq_apart, finish
