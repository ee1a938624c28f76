"""What a way of sharing attention holds beside a rank's own tensors: what is sent, received and put in order.

n tokens a rank holds (of all rows of its batch), R ranks, U of them dividing the heads, H query heads, K key/value
heads, D head dimension. Counted from the code of heads.py, ring.py and gather.py; freed before the next layer.
"""

from __future__ import annotations

import math

from flashtrain.distributed.context.gather import MOST_PIECES
from flashtrain.distributed.context.traffic import GRADIENT_BYTES
from flashtrain.distributed.context.ways import ALL_GATHER, Choice

MASK_BYTES = 4 * (7 + 5)  # int32 rows of a mask of the whole sequence, and of the part for a rank's own tokens


def exchange_bytes(
    choice: Choice, *, held: int, degree: int, heads: int, kv_heads: int, head_dim: int, bytes_each: int = 2
) -> int:
    """Bytes on one rank while one layer's attention goes backward, which needs more than forward.

    held: n. bytes_each: of a number of q, k and v. 0 for one rank, which exchanges nothing.
    """
    if degree == 1:
        return 0
    whole = held * degree * MASK_BYTES
    if choice.way == ALL_GATHER:
        return whole + _gathered(held * degree, kv_heads, head_dim, bytes_each)
    copies = math.lcm(kv_heads, choice.heads_degree)
    peak = 0
    if choice.heads_degree > 1:
        # q, k, v, the output and its gradient: as sent, as received, and in order.
        peak = 3 * held * (3 * heads + 2 * copies) * head_dim * bytes_each
    if choice.heads_degree < degree:
        numbers = 2 * held * copies * head_dim  # of keys and values, or of their gradients
        # Those at hand and those that come; own gradients, and those that leave and come; gradients of queries.
        ring = 2 * numbers * bytes_each + 3 * numbers * GRADIENT_BYTES + held * heads * head_dim * GRADIENT_BYTES
        # While the ring turns, what was exchanged among the heads' ranks is there once.
        peak = max(peak, peak // 3 + ring)
    return whole + peak


def _gathered(tokens: int, kv_heads: int, head_dim: int, bytes_each: int) -> int:
    """tokens: R * n."""
    pieces = max(count for count in range(1, MOST_PIECES + 1) if kv_heads % count == 0)
    numbers = 2 * tokens * (kv_heads // pieces) * head_dim  # of one piece's keys and values
    # This piece as gathered, joined and in order, and the next one; gradients of every piece wait until they are added
    # up, the last one's whole, dealt and without padding.
    return 4 * numbers * bytes_each + (pieces + 2) * numbers * GRADIENT_BYTES
