"""Which tiles of 64 queries the fused backward kernel visits for a block of keys, and where in
the batch that block is.

Sq queries, Sk keys. A work item (`item` in names) is the block of keys that a program computes dK
and dV of: 128 keys of one key/value head (64 at D = 256). With packed sequences work items and
tiles are counted in slots (sequences.py).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.tiles import Bounds
from .assembly import noted, opaque
from .sequences import LANES, find, first_slot, sequence_of

BLOCK_Q = gl.constexpr(64)
BLOCK_K = gl.constexpr(128)
# How the query tiles of an item are found: by arithmetic, in a mask's plan, or in the lists of
# a block-sparse mask.
BAND = gl.constexpr(0)
PLAN = gl.constexpr(1)
BLOCKS = gl.constexpr(2)
# Where with C.deterministic `notes` has a program's number, and from where on its barriers
# (backward_deterministic.py).
TICKET = gl.constexpr(12)
BARRIERS = gl.constexpr(13)
NUMBERS = gl.constexpr(12)  # where with C.counted `notes` has two numbers of items
# Where `notes` has the packed sequence that an item is of, and which tile in it: at D = 256, and of
# two items with C.counted.
FOUND = gl.constexpr(14)
NEVER = gl.constexpr(1 << 30)  # more steps than any item has


class Call(NamedTuple):
    """The arguments of the fused backward kernel that are the same for all blocks of keys."""

    scale_log2: Any  # softcap.scale_of
    heads: Any  # H
    bounds: Any
    query_tiles: Any
    key_tiles: Any
    # B K, each key/value head counted once for each part of its query heads (C.split).
    all_heads: Any
    heads_together: Any  # how many heads' items are sorted by tiles of keys
    mask: Any  # Mask.queries
    positions: Any  # Mask.keys
    table: Any  # of tiles; of packed sequences where their keys end
    blocks: Any  # the list of blocks; of packed sequences where their queries end
    dk: Any  # the results
    dv: Any
    flags: Any


class Reach(NamedTuple):
    """The tiles [first, past) of 64 queries that see a block of keys. They are visited from `start`
    to `past`, then from `first` to `start`."""

    first: Any
    first_full: Any  # tiles in [first_full, past_full) need no mask
    past_full: Any
    past: Any
    start: Any


class Walk(NamedTuple):
    """How to find the tiles of queries that see one block of keys: a Reach, or a row of a mask's
    table. With packed sequences tiles are slots, and `bounds` counts queries from slot 0, so that
    consumers need no other case."""

    reach: Any
    tail: Any  # the item goes past Sk
    row: Any
    stride_head: Any
    blocks: Any
    bounds: Any  # the item's
    queries_at: Any  # where the rows of tile 0 and of key 0 are; 0 but for packed sequences
    keys_at: Any
    item_tile: Any  # the item's place among call.key_tiles
    sequence: Any  # the batch row's number, or the packed sequence's
    first_position: Any  # among the item's keys, that of the query 0 which tiles are counted from


class Masks(NamedTuple):
    """Pointers into a batch row of a Mask: `queries`, with `plane` between its rows, and
    the keys' `positions`."""

    queries: Any
    plane: Any
    positions: Any


@gluon.jit
def band_tiles(
    first_key, bounds, LEFT: gl.constexpr, RIGHT: gl.constexpr, KEYS: gl.constexpr,
    PACKED: gl.constexpr,
    DETERMINISTIC: gl.constexpr = False,
):  # fmt: skip
    """Return which tiles of queries see the keys [first_key, first_key + KEYS) within a window, as
    a Reach. bounds: Sq, Sk and the window; LEFT, RIGHT: whether it has that side, bounds.left <=
    key - query, key - query <= bounds.right. Without both, `start` differs between blocks of keys,
    so that programs add to different tiles of dQ at a time. PACKED: keys from Sk on get no tile.
    DETERMINISTIC: keys that no query sees get no tile (else perhaps one)."""
    last = gl.minimum(first_key + KEYS, bounds.seqlen_k) - 1
    low = 0
    full_low = 0
    high = bounds.seqlen_q
    full_high = bounds.seqlen_q + BLOCK_Q  # rows past Sq have weight 0 whatever their scores are
    if RIGHT:
        low = first_key - bounds.right
        full_low = last - bounds.right
    if LEFT:
        high = gl.minimum(high, last - bounds.left + 1)
        full_high = gl.minimum(full_high, first_key - bounds.left + 1)
    low = gl.maximum(low, 0)
    high = gl.maximum(high, low)
    first = low // BLOCK_Q
    past = (high + BLOCK_Q - 1) // BLOCK_Q
    if DETERMINISTIC:
        past = gl.where(high > low, past, first)
    first_full = (gl.maximum(full_low, 0) + BLOCK_Q - 1) // BLOCK_Q
    first_full = gl.minimum(gl.maximum(first_full, first), past)
    past_full = gl.minimum(gl.maximum(gl.maximum(full_high, 0) // BLOCK_Q, first_full), past)
    if first_key + KEYS > bounds.seqlen_k:  # dQ would see keys past Sk
        first_full = past
        past_full = past
    if PACKED:
        past = gl.where(first_key < bounds.seqlen_k, past, first)
    start = first
    if not (LEFT or RIGHT):
        start = (2 * first_key // KEYS) % (gl.maximum(past, 1) if PACKED else past)
    return Reach(first, first_full, past_full, past, start)


@gluon.jit
def tile_count(member, walk, C: gl.constexpr):
    """Return how many tiles of queries of the group's query head `member` see a
    block of keys (a Walk)."""
    row = walk.row
    if C.kind == BAND:
        count = walk.reach.past - walk.reach.first
    elif C.kind == PLAN:
        count = gl.load(row) + gl.load(row + 8)
    else:
        begin = member * walk.stride_head
        count = ((gl.load(row + begin + 2) - gl.load(row + begin)) * C.tiles).to(gl.int32)
    return count


@gluon.jit
def tile_of(i, member, walk, C: gl.constexpr):
    """Return (number of the tile of queries, whether pairs of it may be masked) that step i of a
    block of keys visits for query head `member` of the group. walk: the block's Walk; the rows of a
    mask's table: portable/traversal.py."""
    row = walk.row
    if C.kind == BAND:
        reach = walk.reach
        if C.deterministic:
            # Opaque, as the ends in work_of: else the compiler keeps sums with i in registers
            # that there are not.
            tile = opaque(reach.past - 1 - i)
        else:
            tile = reach.start + i
            tile = gl.where(tile >= reach.past, tile - (reach.past - reach.first), tile)
        masked = (tile < reach.first_full) | (tile >= reach.past_full)
    elif C.kind == PLAN:
        masked_tiles = gl.load(row)
        k = i - masked_tiles
        tile = gl.where(
            k < gl.load(row + 10), gl.load(row + 9) + k, gl.load(row + 11) + k - gl.load(row + 10)
        )
        hidden = gl.where(
            i < gl.load(row + 2), gl.load(row + 1) + i, gl.load(row + 3) + i - gl.load(row + 2)
        )
        hidden = gl.where(i < gl.load(row + 4), hidden, gl.load(row + 5) + i - gl.load(row + 4))
        hidden = gl.where(i < gl.load(row + 6), hidden, gl.load(row + 7) + i - gl.load(row + 6))
        masked = (k < 0) | walk.tail
        tile = gl.where(k < 0, hidden, tile)
    else:
        begin = gl.load(row + member * walk.stride_head)
        split = gl.load(row + member * walk.stride_head + 1)
        tile = gl.load(walk.blocks + begin + i // C.tiles) * C.tiles + i % C.tiles
        masked = (i < ((split - begin) * C.tiles).to(gl.int32)) | walk.tail
    return tile, masked


@gluon.jit
def first_step(walk, C: gl.constexpr):
    """Return, for a block of keys: the number of steps, one a query head and tile; the first query
    head of the group that has tiles (0 if none has); and how many tiles that head has."""
    member = 0
    tiles = tile_count(0, walk, C)
    count = tiles * C.group
    if C.kind == BLOCKS:
        for other in range(1, C.group):
            count += tile_count(other, walk, C) - tiles
        while (tiles == 0) & (member < C.group - 1):
            member += 1
            tiles = tile_count(member, walk, C)
    return count, member, tiles


@gluon.jit
def next_step(i, member, tiles, walk, C: gl.constexpr):
    """Return (i, member, tiles) of the step after step i of query head `member`, which visits
    `tiles` tiles for a block of keys. With C.deterministic a group's query heads take turns at each
    tile, else one head follows the other."""
    if C.deterministic and C.group > 1:
        member += 1
        i = gl.where(member == C.group, i + 1, i)
        member = gl.where(member == C.group, 0, member)
    else:
        i += 1
    if C.group == 1:
        # Else the compiler keeps sums with i in registers that there are not.
        i = gl.where(i == tiles, 0, i)
    if C.group > 1 and not C.deterministic:  # noqa: SIM102 - decided while compiling; while running
        if i == tiles:
            i = 0
            member += 1
            if C.kind == BLOCKS:
                tiles = tile_count(gl.minimum(member, C.group - 1), walk, C)
                while (tiles == 0) & (member < C.group - 1):
                    member += 1
                    tiles = tile_count(member, walk, C)
    return i, member, tiles


@gluon.jit
def own_number(notes, C: gl.constexpr):
    """Return this program's number: its id or, with C.deterministic, how many
    programs started before it."""
    if C.deterministic:
        number = noted(notes, TICKET).to(gl.int32)
    else:
        number = gl.program_id(0)
    return number


@gluon.jit
def steps_behind(walk, first_key, C: gl.constexpr):
    """Return n, for C.deterministic: before step j of this block of keys adds to a tile of dQ, the
    preceding block of keys must have added to it in its step j - n (none if below 0). n is NEVER
    for a sequence's first block of keys."""
    # Lower keys are seen from lower tiles on: whoever waits for the preceding item has
    # waited for all before it.
    behind = 0
    if C.left:
        # The keys before are seen up to there.
        high = gl.minimum(walk.bounds.seqlen_q, first_key - walk.bounds.left)
        past = (gl.maximum(high, 0) + BLOCK_Q - 1) // BLOCK_Q
        behind = (walk.reach.past - past) * C.group
    return gl.where(first_key == 0, NEVER, behind)


@gluon.jit
def counter_of(first_key, walk, head_place, call, C: gl.constexpr):
    """Return the index, among all blocks of keys, of the block that starts at first_key, by which
    its step counters are found (C.deterministic). walk, head_place: from work_of."""
    tile = walk.item_tile if C.packed else first_key // BLOCK_K
    kv_heads = call.heads // C.group
    return (
        head_place // call.heads * kv_heads + head_place % call.heads // C.group
    ) * call.key_tiles + tile


@gluon.jit
def share(call, notes, C: gl.constexpr):
    """Return (first, past, step), a range of numbers of the blocks of keys that this program
    computes; `item_of` turns a number into a work item. With C.whole the numbers count the blocks
    of the program's own heads, else all."""
    begin = own_number(notes, C)
    past = call.key_tiles * call.all_heads
    step = gl.num_programs(0)
    if C.whole:
        past = (call.all_heads + step - 1 - begin) // step * call.key_tiles
        begin = 0
        step = 1
    return begin, past, step


@gluon.jit
def take_number(counter):
    """Add 1 to `counter`, an int32 in global memory, and return its value before. All threads of
    one warp must call this together."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; mov.u32 "
        "$0, 0; @p atom.relaxed.gpu.global.add.u32 $0, [$1], 1; shfl.sync.idx.b32 $0, "
        "$0, 0, 31, 0xffffffff; }",
        "=&r,l,~{memory}", [counter.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def store_number(notes, place, number):
    """Store a number for the consumers at index `place` of `notes`, before K and V of its item are
    fetched."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    notes.index(place).store(gl.full([1], number.to(gl.int64), gl.int64, layout=ONE))


@gluon.jit
def load_number(notes, place):
    """Load the number that `store_number` stored. The caller first waits for
    that item's K and V."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(notes.index(place).load(ONE), 0).to(gl.int32)


@gluon.jit
def item_of(number, call, WHOLE: gl.constexpr):
    """Return the work item (block of keys) of a number from `share`. WHOLE: a
    program computes whole heads."""
    item = number
    if WHOLE:
        head = gl.program_id(0) + number // call.key_tiles * gl.num_programs(0)
        item = head * call.key_tiles + number % call.key_tiles
    return item


@gluon.jit
def place_of(item, call, C: gl.constexpr):
    """Return (tile of keys, index of the key/value head over the batch) of a work item."""
    # Items: heads within key tiles within groups of `heads_together` heads.
    if C.whole:
        key_tile = item % call.key_tiles
        head_index = item // call.key_tiles
    else:
        group = item // (call.heads_together * call.key_tiles)
        place = item % (call.heads_together * call.key_tiles)
        together = gl.minimum(call.heads_together, call.all_heads - group * call.heads_together)
        key_tile = place // together
        head_index = group * call.heads_together + place % together
    return key_tile, head_index


@gluon.jit
def sequence_of_item(item, call, sequences, C: gl.constexpr):
    """Return (packed sequence, number of the tile in it) of a work item's keys."""
    key_tile, _head_index = place_of(item, call, C)
    lanes = gl.arange(0, LANES, layout=gl.BlockedLayout([LANES // 32], [32], [gl.num_warps()], [0]))
    return find(key_tile, lanes, call.table, sequences, call.bounds.seqlen_k, C.keys)


@gluon.jit
def work_of(item, call, notes, C: gl.constexpr, slot=0):
    """Return (Walk, Masks, first key, b H + h) of a work item: a block of C.keys keys of a
    key/value head in batch row b, whose group of query heads begins at h. item: its number; notes:
    int64 words that backward_kernel stored; slot: which of the two items in `notes` it is, with
    C.counted."""
    key_tile, head_index = place_of(item, call, C)
    batch = head_index // (call.heads // C.group)
    kv_head = head_index % (call.heads // C.group)
    bounds = call.bounds
    queries_at = 0
    keys_at = 0
    item_tile = key_tile
    sequence = batch
    if C.packed:
        sequences = noted(notes, 9).to(gl.int32)
        if C.counted or C.keys < BLOCK_K:
            number = load_number(notes, FOUND + 2 * slot)
            key_tile = load_number(notes, FOUND + 2 * slot + 1)
        else:
            number, key_tile = sequence_of_item(item, call, sequences, C)
        sequence = number
        queries_at, keys_at, bounds = sequence_of(
            number, call.blocks, call.table, sequences, bounds, True
        )
    first_key = key_tile * C.keys
    row = call.table
    stride_head = first_key.to(gl.int64)
    mask = call.mask
    plane = first_key.to(gl.int64)
    position = call.positions
    if C.kind != BAND:
        stride_head = noted(notes, 7)
        row += batch * noted(notes, 6) + kv_head * C.group * stride_head
        row += (first_key // C.block_rows) * noted(notes, 8)
    if C.intervals:
        plane = noted(notes, 9)
        mask += batch * noted(notes, 10)
        position += batch * noted(notes, 11)
    reach = band_tiles(first_key, bounds, C.left, C.right, C.keys, C.packed, C.deterministic)
    if C.deterministic:
        reach = Reach(
            reach.first, opaque(reach.first_full), opaque(reach.past_full), reach.past, reach.start
        )
    tail = first_key + C.keys > bounds.seqlen_k
    first_position = bounds.seqlen_k - bounds.seqlen_q
    if C.packed:
        slot = first_slot(number, queries_at, BLOCK_Q)
        reach = Reach(
            slot + reach.first,
            slot + reach.first_full,
            slot + reach.past_full,
            slot + reach.past,
            slot + reach.start,
        )
        before = slot * BLOCK_Q
        first_position -= before
        bounds = Bounds(
            bounds.seqlen_q + before, bounds.seqlen_k, bounds.left - before, bounds.right - before
        )
        queries_at -= before
    walk = Walk(
        reach, tail, row, stride_head, call.blocks, bounds, queries_at, keys_at, item_tile,
        sequence, first_position
    )  # fmt: skip
    return walk, Masks(mask, plane, position), first_key, batch * call.heads + kv_head * C.group
