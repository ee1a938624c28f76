"""What a way of sharing attention holds beside a rank's own tensors: what is sent, received and put in order.

n tokens a rank holds (of all rows of its batch), R ranks, U of them dividing the heads, H query heads, K key/value
heads, D head dimension. Counted from the code of heads.py, ring.py and gather.py, and set beside the traced allocations
of four gloo ranks on a CPU (MHA and GQA; without the kernels' own, and what gloo copies): within 10% of their peaks
(the all-to-all in one piece; what several need was only counted).
"""

from __future__ import annotations

import math

from flashtrain.distributed.context.traffic import GRADIENT_BYTES
from flashtrain.distributed.context.transfers import pieces_of
from flashtrain.distributed.context.ways import ALL_GATHER, Choice

MASK_BYTES = 4 * (7 + 5)  # int32 rows of a mask of the whole sequence, and of the part for a rank's own tokens
SUM_BYTES = 4  # partial results are merged in float32
MERGED = 6  # tensors as large as the output while two partial results are merged


def exchange_bytes(
    choice: Choice, *, held: int, degree: int, heads: int, kv_heads: int, head_dim: int, bytes_each: int = 2
) -> int:
    """Bytes on one rank at the peak of one layer's attention, forward or backward; freed before the next layer.

    held: n. bytes_each: of a number of q, k and v. 0 for one rank, which exchanges nothing.
    """
    if degree == 1:
        return 0
    whole = held * degree * MASK_BYTES
    queries = held * heads * head_dim
    if choice.way == ALL_GATHER:
        return whole + _gathered(held, degree, kv_heads, head_dim, bytes_each) + queries * bytes_each
    numbers = 2 * held * math.lcm(kv_heads, choice.heads_degree) * head_dim  # of keys and values, heads repeated
    divided = choice.heads_degree > 1
    # Among the ranks that divide the heads: q, k, v, output and its gradient go there, three gradients come back.
    there, back = (3 * queries + numbers) * bytes_each * divided, (queries + numbers) * bytes_each * divided
    peak = 2 * there + 3 * back
    if choice.heads_degree == degree:
        # Each rank's own heads go in pieces: one at hand, one coming, and of those that left what came in return.
        own = math.lcm(kv_heads, degree) // degree
        pieces = len(pieces_of(own, own))
        peak = peak if pieces == 1 else max(3 * back, (4 * there + 3 * back) // pieces + back)
    else:
        # Keys and values at hand and coming, their gradients as computed; in float32 own, leaving and coming ones.
        backward = 4 * numbers * bytes_each + 3 * numbers * GRADIENT_BYTES + queries * SUM_BYTES
        forward = 2 * numbers * bytes_each + MERGED * queries * SUM_BYTES
        peak = max(peak, backward + 2 * there, forward + 2 * back)
    return whole + peak


def _gathered(held: int, degree: int, kv_heads: int, head_dim: int, bytes_each: int) -> int:
    pieces = len(pieces_of(kv_heads, kv_heads))
    numbers = 2 * held * degree * (kv_heads // pieces) * head_dim  # of one piece's keys and values, all ranks'
    # This piece as gathered, joined and in order, its gradients, and the next one. In float32 its gradients whole,
    # dealt and without padding, and the sums for this rank's tokens of every piece.
    sums = pieces * numbers // degree
    return 5 * numbers * bytes_each + (3 * numbers + sums) * GRADIENT_BYTES
