"""Which key tiles a tile of queries visits, and which of a tile's pairs are visible: the portable path's traversal with
Gluon's layouts.

Sq queries, Sk keys. bounds: (Sq, Sk, left, right). mask: of a Mask or BlockMask, (table, its strides by batch, head and
tile, stride of a batch row of Mask.queries, stride of one of its numbers). F: portable.launch.Features.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.traversal import key_pieces, position_of_step
from .assembly import opaque


@gluon.jit
def pieces_of(batch, head, first_query, bounds, mask, F: gl.constexpr, TILE_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """The key tiles of a tile of queries, and where their list starts; see portable/traversal.py."""
    table = mask[0]
    if F.intervals or F.block_q:
        table += batch.to(gl.int64) * mask[1] + head.to(gl.int64) * mask[2]
    return key_pieces(first_query, bounds, table, mask[3], F, TILE_Q, BLOCK_K)


@gluon.jit
def place(step, pieces, list_ptr, F: gl.constexpr, TILES: gl.constexpr, BLOCK_K: gl.constexpr):
    """The first key of the tile of a step: the masked tiles first, then the full ones."""
    masked = pieces[0]
    if F.block_q:
        early = step < masked
        first = gl.where(early, pieces[1], pieces[9])
        inside = gl.where(early, step, step - masked)
        real = step < masked + pieces[8]
        key = (gl.load(list_ptr + first + inside // TILES, mask=real, other=0) * TILES + inside % TILES) * BLOCK_K
    else:
        early = position_of_step(step, 0, pieces, list_ptr, True, False, F, TILES, BLOCK_K, BLOCK_K)
        late = position_of_step(step - masked, 0, pieces, list_ptr, False, False, F, TILES, BLOCK_K, BLOCK_K)
        key = gl.where(step < masked, early, late)
    return key


@gluon.jit
def interval_rows(row, batch, bounds, mask, rows_ptr, F: gl.constexpr):
    """The intervals of key positions that each query sees; zeros without a Mask."""
    low = row
    high = row
    low2 = row
    high2 = row
    if F.intervals:
        real = row < bounds[0]
        base = rows_ptr + batch.to(gl.int64) * mask[4]
        low = gl.load(base + row, mask=real, other=0)
        high = gl.load(base + mask[5] + row, mask=real, other=0)
        if F.intervals == 2:
            low2 = gl.load(base + 5 * mask[5] + row, mask=real, other=0)
            high2 = gl.load(base + 6 * mask[5] + row, mask=real, other=0)
    return low, high, low2, high2


@gluon.jit
def sees(query, key, bounds, mask_rows, F: gl.constexpr):
    """Does the mask let a query see a key? Shapes broadcast; keys past Sk are not looked for."""
    seen = query < bounds[0]
    if F.left:
        seen = seen & (key >= query + bounds[2])
    if F.right:
        seen = seen & (key <= query + bounds[3])
    if F.intervals:
        low, high, low2, high2 = mask_rows
        inside = (key >= low) & (key < high)
        if F.intervals == 2:
            inside = inside | ((key >= low2) & (key < high2))
        seen = seen & inside
    return seen


@gluon.jit
def hide(
    scores, row, step, shown, item, bounds, mask, list_ptr, rows_ptr, F: gl.constexpr, TILE_Q: gl.constexpr,
    TILES: gl.constexpr,
):  # fmt: skip
    """-inf for the hidden pairs of the tile of scores of a step. shown: false where it is not to be seen at all.

    Where the tile lies and what its rows see is found out anew: kept from step to step it would cost the
    loop registers.
    """
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
    # Everything that is the same along a row is settled there: one comparison a pair for each bound is left. Rows past
    # Sq may see anything, as they are not stored.
    key = first_key + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    past = gl.where(shown, bounds[1], 0)
    if F.intervals:
        low, high, low2, high2 = interval_rows(row, batch, bounds, mask, rows_ptr, F)
        seen = (key >= low[:, None]) & (key < gl.minimum(high, past)[:, None])
        if F.intervals == 2:
            seen = seen | ((key >= low2[:, None]) & (key < gl.minimum(high2, past)[:, None]))
    elif F.right:
        seen = key < gl.minimum(row + (bounds[3] + 1), past)[:, None]
    else:
        seen = key < past
    if F.left:
        seen = seen & (key >= (row + bounds[2])[:, None])
    return gl.where(seen, scores, float("-inf"))
