"""Which tiles of queries the fused backward kernel visits for an item, and where the item is.

Sq queries, Sk keys. A tile is 64 queries; an item is 128 keys of a key/value head (64 at D = 256).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK_Q = gl.constexpr(64)
BLOCK_K = gl.constexpr(128)
# How the query tiles of an item are found: by arithmetic, in a mask's plan, or in the lists of a block-sparse mask.
BAND = gl.constexpr(0)
PLAN = gl.constexpr(1)
BLOCKS = gl.constexpr(2)


@gluon.jit
def band_tiles(first_key, bounds, LEFT: gl.constexpr, RIGHT: gl.constexpr, KEYS: gl.constexpr):
    """The query tiles [first, past) that see the keys [first_key, first_key + KEYS); those in [first_full, past_full)
    need no mask. Without bounds programs begin at different tiles, so that they do not all add to the same dQ at once.
    """
    seqlen_q, seqlen_k, left, right = bounds
    last = gl.minimum(first_key + KEYS, seqlen_k) - 1
    low = 0
    full_low = 0
    high = seqlen_q
    full_high = seqlen_q + BLOCK_Q  # rows past Sq have weight 0 whatever their scores are
    if RIGHT:
        low = first_key - right
        full_low = last - right
    if LEFT:
        high = gl.minimum(high, last - left + 1)
        full_high = gl.minimum(full_high, first_key - left + 1)
    low = gl.maximum(low, 0)
    high = gl.maximum(high, low)
    first = low // BLOCK_Q
    past = (high + BLOCK_Q - 1) // BLOCK_Q
    first_full = (gl.maximum(full_low, 0) + BLOCK_Q - 1) // BLOCK_Q
    first_full = gl.minimum(gl.maximum(first_full, first), past)
    past_full = gl.minimum(gl.maximum(gl.maximum(full_high, 0) // BLOCK_Q, first_full), past)
    if first_key + KEYS > seqlen_k:  # dQ would see keys past Sk
        first_full = past
        past_full = past
    start = first
    if not (LEFT or RIGHT):
        start = (2 * first_key // KEYS) % past
    return first, first_full, past_full, past, start


@gluon.jit
def tile_count(member, walk, KIND: gl.constexpr, TILES: gl.constexpr):
    """How many tiles of queries a head of the group visits."""
    reach, _tail, row, stride_head, _list_ptr = walk
    if KIND == BAND:
        count = reach[3] - reach[0]
    elif KIND == PLAN:
        count = gl.load(row) + gl.load(row + 8)
    else:
        count = ((gl.load(row + member * stride_head + 2) - gl.load(row + member * stride_head)) * TILES).to(gl.int32)
    return count


@gluon.jit
def tile_of(i, member, walk, KIND: gl.constexpr, TILES: gl.constexpr):
    """The tile of a head's step i, and whether it needs the mask. See portable/traversal.py for the tables."""
    reach, tail, row, stride_head, list_ptr = walk
    if KIND == BAND:
        tile = reach[4] + i
        tile = gl.where(tile >= reach[3], tile - (reach[3] - reach[0]), tile)
        masked = (tile < reach[1]) | (tile >= reach[2])
    elif KIND == PLAN:
        masked_tiles = gl.load(row)
        k = i - masked_tiles
        tile = gl.where(k < gl.load(row + 10), gl.load(row + 9) + k, gl.load(row + 11) + k - gl.load(row + 10))
        hidden = gl.where(i < gl.load(row + 2), gl.load(row + 1) + i, gl.load(row + 3) + i - gl.load(row + 2))
        hidden = gl.where(i < gl.load(row + 4), hidden, gl.load(row + 5) + i - gl.load(row + 4))
        hidden = gl.where(i < gl.load(row + 6), hidden, gl.load(row + 7) + i - gl.load(row + 6))
        masked = (k < 0) | tail
        tile = gl.where(k < 0, hidden, tile)
    else:
        begin = gl.load(row + member * stride_head)
        split = gl.load(row + member * stride_head + 1)
        tile = gl.load(list_ptr + begin + i // TILES) * TILES + i % TILES
        masked = (i < ((split - begin) * TILES).to(gl.int32)) | tail
    return tile, masked


@gluon.jit
def first_step(walk, KIND: gl.constexpr, TILES: gl.constexpr, GROUP: gl.constexpr):
    """How many tiles all heads of the group visit; the first head with any, and how many it visits."""
    member = 0
    tiles = tile_count(0, walk, KIND, TILES)
    count = tiles * GROUP
    if KIND == BLOCKS:
        for other in range(1, GROUP):
            count += tile_count(other, walk, KIND, TILES) - tiles
        while (tiles == 0) & (member < GROUP - 1):
            member += 1
            tiles = tile_count(member, walk, KIND, TILES)
    return count, member, tiles


@gluon.jit
def next_step(i, member, tiles, walk, KIND: gl.constexpr, TILES: gl.constexpr, GROUP: gl.constexpr):
    i += 1
    if GROUP == 1:
        i = gl.where(i == tiles, 0, i)  # else the compiler keeps sums with i in registers that there are not
    if GROUP > 1:  # noqa: SIM102 - decided while compiling; while running
        if i == tiles:
            i = 0
            member += 1
            if KIND == BLOCKS:
                tiles = tile_count(gl.minimum(member, GROUP - 1), walk, KIND, TILES)
                while (tiles == 0) & (member < GROUP - 1):
                    member += 1
                    tiles = tile_count(member, walk, KIND, TILES)
    return i, member, tiles


@gluon.jit
def note(notes, PLACE: gl.constexpr, values):
    """Keep a tuple of integers and addresses in shared memory: registers are for the tiles."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for i in gl.static_range(len(values)):
        notes.index(PLACE + i).store(gl.full([1], gl.to_tensor(values[i]).to(gl.int64), gl.int64, layout=ONE))


@gluon.jit
def noted(notes, PLACE: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(notes.index(PLACE).load(ONE), 0)


@gluon.jit
def share(call, WHOLE: gl.constexpr):
    """The numbers of a program's items, from, to and step: among all items, or with WHOLE among its own heads'."""
    key_tiles, all_heads = call[4], call[5]
    begin = gl.program_id(0)
    past = key_tiles * all_heads
    step = gl.num_programs(0)
    if WHOLE:
        past = (all_heads + step - 1 - begin) // step * key_tiles
        begin = 0
        step = 1
    return begin, past, step


@gluon.jit
def item_of(number, call, WHOLE: gl.constexpr):
    """The item of a number of `share`'s. With WHOLE those of a head follow each other."""
    item = number
    if WHOLE:
        key_tiles = call[4]
        item = (gl.program_id(0) + number // key_tiles * gl.num_programs(0)) * key_tiles + number % key_tiles
    return item


@gluon.jit
def work_of(item, call, notes, C: gl.constexpr):
    """Where an item (C.keys keys of a key/value head) is, and the tiles it visits. call: what all items share.

    Items: heads within key tiles within groups of `heads_together` heads.
    """
    _scale, heads, bounds, _query_tiles, key_tiles, all_heads, heads_together, pointers, _results = call
    mask_ptr, positions_ptr, table_ptr, list_ptr = pointers
    if C.whole:
        key_tile = item % key_tiles
        head_index = item // key_tiles
    else:
        group = item // (heads_together * key_tiles)
        place = item % (heads_together * key_tiles)
        together = gl.minimum(heads_together, all_heads - group * heads_together)
        key_tile = place // together
        head_index = group * heads_together + place % together
    batch = head_index // (heads // C.group)
    kv_head = head_index % (heads // C.group)
    first_key = key_tile * C.keys
    row = table_ptr
    stride_head = first_key.to(gl.int64)
    mask = mask_ptr
    plane = first_key.to(gl.int64)
    position = positions_ptr
    if C.kind != BAND:
        stride_head = noted(notes, 7)
        row += batch * noted(notes, 6) + kv_head * C.group * stride_head
        row += (first_key // C.block_rows) * noted(notes, 8)
    if C.intervals:
        plane = noted(notes, 9)
        mask += batch * noted(notes, 10)
        position += batch * noted(notes, 11)
    reach = band_tiles(first_key, bounds, C.left, C.right, C.keys)
    walk = (reach, first_key + C.keys > bounds[1], row, stride_head, list_ptr)
    return walk, (mask, plane, position), first_key, batch * heads + kv_head * C.group
