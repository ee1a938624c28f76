"""Which tile of queries a program of the forward or of the dQ kernel computes, and which
keys those queries see.

Sq queries, H query heads. F: launch.Features. C: launch.Tiling.
"""

import triton
import triton.language as tl

from .tiles import bounds_of, head_options, keys_of, query_rows, with_slope
from .traversal import key_pieces


@triton.jit
def query_tile(call, F: tl.constexpr, C: tl.constexpr):
    """Return (batch row * H + head, batch row, head, index of the first query, the same
    as int64, indices of the C.block_q queries) of the tile that this program computes.
    call: launch.Arguments."""
    # The tiles of a head run next to each other, heads of one key/value group too: they share K
    # and V in the L2 cache.
    BLOCK_Q: tl.constexpr = C.block_q
    tiles = tl.cdiv(call.seqlen_q, BLOCK_Q)
    tile = tl.program_id(0) % tiles
    head_index = tl.program_id(0) // tiles
    # Later tiles see more keys: longest first, so that none runs alone at the end.
    if F.right or F.intervals:
        tile = tiles - 1 - tile
    batch = (head_index // call.heads).to(tl.int64)
    head = (head_index % call.heads).to(tl.int64)
    first = tile * BLOCK_Q
    query = first + tl.arange(0, BLOCK_Q)
    return head_index, batch, head, first, tl.cast(first, tl.int64), query


@triton.jit
def seen_keys(batch, head, first, query, k, v, call, table, F: tl.constexpr, C: tl.constexpr):
    """Return what the program needs of its queries' keys: (Bounds, Keys, Head, Rows) of tiles.py
    and the tiles of keys to visit, as traversal.Pieces. batch to query: from query_tile; k, v:
    Strided; table: launch.Table."""
    bounds = bounds_of(call)
    keys = keys_of(k, v, call, table, batch, head, C.group)
    bias = call.bias + batch * call.bias_batch + head * call.bias_head
    options = head_options(head, bias, call, F)
    intervals = call.intervals + batch * call.interval_batch
    rows = with_slope(
        query_rows(query[:, None], batch, bounds, intervals, call.plane, F), options, F
    )
    table_base = table.rows + batch * table.batch + head * table.head
    pieces = key_pieces(first, bounds, table_base, table.row, F, C.block_q, C.block_k)
    return bounds, keys, options, rows, pieces
