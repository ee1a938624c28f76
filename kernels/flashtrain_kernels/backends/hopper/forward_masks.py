"""Which tiles of keys the forward visits for a tile of queries, and which pairs are
visible, in Gluon's layouts.

Sq queries, Sk keys. bounds: portable.tiles.Bounds. F: portable.launch.Features.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.traversal import key_pieces, position_of_step
from .assembly import opaque
from .sequences import sequence_of

# The position of what is no key: `position < high` is false of it, whatever a query's interval is.
_NOWHERE = gl.constexpr(2**31 - 1)


class MaskTables(NamedTuple):
    """A mask's table of the tiles to visit, with its strides, and the strides of Mask.queries."""

    # Of tiles; of packed sequences where their keys end (where their queries end is the list).
    table: Any
    batch: Any  # its strides: by batch row, head and tile
    head: Any
    tile: Any
    rows_batch: Any  # of Mask.queries, the stride of a batch row
    plane: Any  # and of one of its numbers; of packed sequences N


@gluon.jit
def origin(batch, bounds, mask, list_ptr, PACKED: gl.constexpr):
    """Return (batch row in q, k and v, first query, first key, Bounds) of a sequence: (batch, 0, 0,
    bounds) for batch row `batch`. PACKED: `batch` is a packed sequence's number, and the batch row
    is 0. mask: MaskTables."""
    first_query = 0
    first_key = 0
    if PACKED:
        first_query, first_key, bounds = sequence_of(
            batch, list_ptr, mask.table, mask.plane, bounds, False
        )
        batch = 0
    return batch, first_query, first_key, bounds


@gluon.jit
def pieces_of(
    batch,
    head,
    first_query,
    bounds,
    mask,
    F: gl.constexpr,
    TILE_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """Return which tiles of keys the queries [first_query, first_query + TILE_Q) of a head
    see, as traversal.Pieces."""
    table = mask.table
    if F.intervals or F.block_q:
        table += batch.to(gl.int64) * mask.batch + head.to(gl.int64) * mask.head
    return key_pieces(first_query, bounds, table, mask.tile, F, TILE_Q, BLOCK_K)


@gluon.jit
def place(step, pieces, list_ptr, F: gl.constexpr, TILES: gl.constexpr, BLOCK_K: gl.constexpr):
    """Return the first key of the tile visited in step number `step`: first tiles that need
    a mask, then full ones."""
    masked = pieces.masked
    if F.block_q:
        early = step < masked
        first = gl.where(early, pieces.p0, pieces.f0)
        inside = gl.where(early, step, step - masked)
        real = step < masked + pieces.full
        key = (
            gl.load(list_ptr + first + inside // TILES, mask=real, other=0) * TILES + inside % TILES
        ) * BLOCK_K
    else:
        early = position_of_step(step, 0, pieces, list_ptr, True, False, F, TILES, BLOCK_K, BLOCK_K)
        late = position_of_step(
            step - masked, 0, pieces, list_ptr, False, False, F, TILES, BLOCK_K, BLOCK_K
        )
        key = gl.where(step < masked, early, late)
    return key


@gluon.jit
def interval_rows(row, batch, bounds, mask, rows_ptr, F: gl.constexpr):
    """Load what each query `row` of a Mask sees: key positions p with low <= p <
    high or low2 <= p < high2."""
    low = row
    high = row
    low2 = row
    high2 = row
    if F.intervals:
        real = row < bounds.seqlen_q
        base = rows_ptr + batch.to(gl.int64) * mask.rows_batch
        low = gl.load(base + row, mask=real, other=0)
        high = gl.load(base + mask.plane + row, mask=real, other=0)
        if F.intervals == 2:
            low2 = gl.load(base + 5 * mask.plane + row, mask=real, other=0)
            high2 = gl.load(base + 6 * mask.plane + row, mask=real, other=0)
    return low, high, low2, high2


@gluon.jit
def key_position(key, past, batch, bounds, mask, list_ptr, F: gl.constexpr):
    """Return the position of each key index. A Mask may give positions (list_ptr: Mask.keys); then
    an index from `past` on gets a position that no query sees."""
    if F.key_positions:
        # Mask.keys is contiguous, and has as many rows as Mask.queries: one, or one
        # for each of the batch.
        row = gl.where(mask.rows_batch > 0, batch, 0).to(gl.int64)
        key = gl.load(list_ptr + row * bounds.seqlen_k + key, mask=key < past, other=_NOWHERE)
    return key


@gluon.jit
def sees(query, key, bounds, mask_rows, F: gl.constexpr):
    """Return a bool tile, True where a query sees a key (positions that broadcast; a key
    past Sk is not noticed)."""
    seen = query < bounds.seqlen_q
    if F.left:
        seen = seen & (key >= query + bounds.left)
    if F.right:
        seen = seen & (key <= query + bounds.right)
    if F.intervals:
        low, high, low2, high2 = mask_rows
        inside = (key >= low) & (key < high)
        if F.intervals == 2:
            inside = inside | ((key >= low2) & (key < high2))
        seen = seen & inside
    return seen


@gluon.jit
def hide(
    scores, row, step, shown, item, bounds, mask, list_ptr, rows_ptr, F: gl.constexpr,
    TILE_Q: gl.constexpr,
    TILES: gl.constexpr,
    HIDDEN: gl.constexpr = float("-inf"),
):  # fmt: skip
    """Set the scores of masked pairs to HIDDEN in the tile of keys that the loop visits at `step`.
    row: the queries' indices; shown: False masks all; item: (batch, head, first query); rest: see
    `place` and forward.mask_arguments."""
    # Where the tile lies and what its rows see is found again: kept from step to step it
    # would cost registers.
    LAYOUT: gl.constexpr = scores.type.layout
    BLOCK_K: gl.constexpr = scores.shape[1]
    batch, head, first_query = item
    if F.intervals or F.block_q or not F.right:
        zero = opaque(gl.to_tensor(0))
        first_query += zero
        row += zero
        step += zero
    pieces = pieces_of(batch, head, first_query, bounds, mask, F, TILE_Q, BLOCK_K)
    first_key = place(step, pieces, list_ptr, F, TILES, BLOCK_K)
    # What is the same along a row is settled there: one comparison a pair and bound is left. Rows
    # past Sq may see all.
    key = first_key + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    past = gl.where(shown, bounds.seqlen_k, 0)
    if F.key_positions:  # with intervals only, never with a band
        index = first_key + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LAYOUT))
        key = key_position(index, past, batch, bounds, mask, list_ptr, F)[None, :]
        past = _NOWHERE
    if F.intervals:
        low, high, low2, high2 = interval_rows(row, batch, bounds, mask, rows_ptr, F)
        seen = (key >= low[:, None]) & (key < gl.minimum(high, past)[:, None])
        if F.intervals == 2:
            seen = seen | ((key >= low2[:, None]) & (key < gl.minimum(high2, past)[:, None]))
    elif F.right:
        seen = key < gl.minimum(row + (bounds.right + 1), past)[:, None]
    else:
        seen = key < past
    if F.left:
        seen = seen & (key >= (row + bounds.left)[:, None])
    return gl.where(seen, scores, HIDDEN)
