"""The memory that communication takes on one rank.

The estimate counts the buffers of ulysses.py, ring.py and all_gather.py. Tests compare it with the
traced peaks of one rank, without the kernels' own memory. The all-gather of seen keys alone takes
at most what is estimated for all keys.
"""

from __future__ import annotations

import math

from flashtrain.distributed.context.methods import ALL_GATHER, Choice
from flashtrain.distributed.context.traffic import GRADIENT_BYTES, Sizes
from flashtrain.distributed.context.transfers import pieces_of
from flashtrain.distributed.context.ulysses import head_pieces

# int32 rows of a mask of the whole sequence, and of the part for a rank's own tokens.
MASK_BYTES = 4 * (7 + 5)
RUNS = 2  # of a row that a rank holds in the layout zigzag
SUM_BYTES = 4  # the gradients of queries are summed in float32: a ring's, and the kernels'


def exchange_bytes(choice: Choice) -> int:
    """Estimate the bytes that one layer's communication takes on one rank at its peak, which
    is in the backward pass.

    The kernels' float32 sums of the gradients of queries are counted where they are in memory at
    the peak (not for ulysses). The memory is freed before the next layer. The forward pass needs
    less: it has no gradients, and a ring merges partial results in place.

    Args:
        choice: the context-parallel method with the sizes of the attention (choose_method).
    """
    degree, heads, kv_heads, head_dim, held, bytes_each = choice.sizes[:6]
    if degree == 1:
        return 0
    whole = held * degree * MASK_BYTES
    queries = held * heads * head_dim
    if choice.method == ALL_GATHER:
        return whole + _gathered(choice.sizes) + queries * (bytes_each + SUM_BYTES)
    # Of keys and values, heads repeated.
    numbers = 2 * held * math.lcm(kv_heads, choice.heads_degree) * head_dim
    divided = choice.heads_degree > 1
    # Among the ranks that divide the heads: q, k, v, output and its gradient go there, three
    # gradients come back.
    there = (3 * queries + numbers) * bytes_each * divided
    back = (queries + numbers) * bytes_each * divided
    if choice.heads_degree == degree:
        # Each rank's own heads go in pieces: one at hand (while it is taken up, the one
        # before too), one coming, and of those that left what came in return. At the end
        # all of that is joined.
        own = math.lcm(kv_heads, degree) // degree
        *others, last = head_pieces(heads // degree, own, held * degree)
        pieces = len(others) + 1
        peak = (
            max(
                min(2 * pieces - 1, 4) * there + max(pieces, 3) * back,
                there + (2 * pieces + 1) * back,
            )
            // pieces
        )
        # The first piece stays, whose keys and values all read; their gradients are summed.
        if not last.keys.stop:
            peak += there // pieces + numbers * GRADIENT_BYTES
    else:
        # Keys and values at hand and coming, their gradients as computed; in float32 those leaving
        # and those coming. Of half of the heads the gradients over a rank's own keys.
        ring = 3 * numbers * bytes_each + 2 * numbers * GRADIENT_BYTES + queries * SUM_BYTES
        own = math.lcm(kv_heads, choice.heads_degree) // choice.heads_degree
        ring += (queries + numbers) * bytes_each * ((own + 1) // 2) // own
        peak = max(2 * there + 3 * back, ring + 2 * there) + queries * SUM_BYTES
    return whole + peak


def state_bytes(passed: int, columns: int, sizes: Sizes, rows: int) -> tuple[int, int]:
    """Estimate the bytes that a layer of states takes on one rank for what the runs of zigzag pass,
    as (saved for the backward, temporary): maps as gathered, states before runs, and the columns
    that yield the maps, in float32 too; then their gradients.

    Args:
        passed, columns: as in StateSpec, the numbers of a run's map and of a token's columns.
        sizes: degree, tokens that a rank holds and bytes of an element; others are not read.
        rows: the rows of the micro-batch.
    """
    columns *= sizes.held * (sizes.bytes_each + SUM_BYTES)
    maps = SUM_BYTES * RUNS * sizes.degree * rows * passed
    return 2 * maps + columns, maps + columns


def _gathered(sizes: Sizes) -> int:
    pieces = len(pieces_of(sizes.kv_heads, sizes.kv_heads))
    # Of one piece's keys and values, all ranks'.
    numbers = 2 * sizes.held * sizes.degree * (sizes.kv_heads // pieces) * sizes.head_dim
    # This piece as gathered, joined and in order, its gradients, and the next one. In
    # float32 its gradients whole, sharded and without padding, and the sums for this rank's
    # tokens of every piece.
    sums = pieces * numbers // sizes.degree
    return 5 * numbers * sizes.bytes_each + (3 * numbers + sums) * GRADIENT_BYTES
