"""Weights and score gradients of a tile in the fused backward kernel at D = 64 and D = 128.

S^T, P^T, dP^T and dS^T are (64 keys of the warpgroup, 64 queries of the tile).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .alibi import lean
from .backward_parts import HALF, exponent, hide, item_draws, item_slope, threshold_of, weights_of
from .backward_schedule import BLOCK_Q
from .dropout_rng import kept_weights, mark_dropped, score_gradients


@gluon.jit
def keys_of_item(walk, masks, first_key, WG: gl.constexpr, C: gl.constexpr, LAYOUT: gl.constexpr):
    """Return (indices, positions), each (64, 1), of the keys that warpgroup WG holds, of 128 from
    first_key on. The two differ only where a Mask gives positions. walk, masks: from
    backward_schedule.work_of."""
    key = first_key + WG * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    position = key
    if C.key_positions:
        position = gl.load(
            masks.positions + key, mask=key < walk.bounds.seqlen_k, other=-2147483648
        )
    return key, position


@gluon.jit
def changes_of_item(keys, walk, masks, head_place, call, notes, C: gl.constexpr):
    """Return (ALiBi slope, dropout's 16-bit threshold, source of its random numbers: `draws_of`) of
    a block of keys for the first query head of its group; 0 for what the call does not have. keys:
    from `keys_of_item`; walk, masks, head_place: from backward_schedule.work_of; notes: shared
    int64 words that backward_kernel stored."""
    slope = 0.0
    threshold = 0
    draws = 0
    if C.alibi:
        slope = item_slope(0, walk, masks, head_place, call, notes, C)
    if C.dropout:
        threshold = threshold_of(notes)
        draws = item_draws(0, walk, masks, keys[0], head_place, call, C)
    return slope, threshold, draws


@gluon.jit
def scores_of(
    s, slope, rows, tile, masked, i, member, keys, walk, masks, head_place, call, notes,
    C: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return (log2 of the weights, or softcap's tanh: see `exponent`; ALiBi slope of query head
    `member` of the group) from s = K Q^T of a tile of queries, after ALiBi and, if `masked`, the
    mask. rows: statistics (see `exponent`); i, member: the loop's step and query head
    (backward_schedule.tile_of); others: see `changes_of_item`."""
    key, position = keys
    s = exponent(s, rows, call, C)
    if C.alibi:
        if C.group > 1:  # noqa: SIM102 - decided while compiling; while running
            if C.deterministic or i == 0:
                slope = item_slope(member, walk, masks, head_place, call, notes, C)
        s = lean(s, key - (tile * BLOCK_Q + walk.first_position), slope)
    if masked:
        s = hide(s, tile, key, position, walk.bounds, masks, C, LAYOUT)
    return s, slope


@gluon.jit
def dropped_weights_of(
    s, draws, threshold, rows, tile, i, member, keys, walk, masks, head_place, call,
    DTYPE: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Return (P, P in DTYPE as dV's operand, factor by which dP - delta gives dS, `draws_of` for
    query head `member`). A weight that dropout drops is negated in P and 0 in the operand. s, rows,
    i, member: see `scores_of`."""
    p, factor = weights_of(s, rows, call, C)
    if C.dropout:
        if C.group > 1:  # noqa: SIM102 - decided while compiling; while running
            if C.deterministic or i == 0:
                draws = item_draws(member, walk, masks, keys[0], head_place, call, C)
        p = mark_dropped(p, tile, draws, threshold)
        p16 = kept_weights(p, DTYPE)
    else:
        p16 = p.to(DTYPE)
    return p, p16, factor, draws


@gluon.jit
def score_gradients_of(p, factor, dp, threshold, rows, C: gl.constexpr, LAYOUT: gl.constexpr):
    """Return dS from dp = dP. With dropout the result is dS times the
    probability of keeping a weight.

    p, factor: what dropped_weights_of returned. rows: 64 log-sum-exps, then 64 deltas.
    """
    delta = rows.slice(BLOCK_Q, BLOCK_Q).load(gl.SliceLayout(0, LAYOUT))
    if C.dropout:
        ds = score_gradients(p, dp, delta[None, :], threshold)
    else:
        ds = factor * (dp - delta[None, :])
    return ds
