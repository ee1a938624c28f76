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
    """Return (indices, positions) of warpgroup WG's 64 keys of an item that begins at first_key, each (64, 1)."""
    key = first_key + WG * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    position = key
    if C.key_positions:
        position = gl.load(masks.positions + key, mask=key < walk.bounds.seqlen_k, other=-2147483648)
    return key, position


@gluon.jit
def changes_of_item(keys, walk, masks, head_place, call, notes, C: gl.constexpr):
    """Return (ALiBi slope, dropout threshold, Philox key and counters) of the group's first query head; 0 if unused."""
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
    s, slope, rows, tile, masked, i, member, keys, walk, masks, head_place, call, notes, C: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Turn products s (keys, queries) into (the weights' exponents after softcap, ALiBi and mask, the ALiBi slope of
    query head `member`). i, member: the step, see backward_schedule.tile_of."""
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
    s, draws, threshold, rows, tile, i, member, keys, walk, masks, head_place, call, DTYPE: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Return (P, P as an operand of dV, the factor of dP - delta in dS, Philox key and counters of query head
    `member`). A dropped weight is negative in P and 0 in the operand."""
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
    """Return dS of a tile; with dropout, times the probability of keeping a weight. factor: from dropped_weights_of."""
    delta = rows.slice(BLOCK_Q, BLOCK_Q).load(gl.SliceLayout(0, LAYOUT))
    if C.dropout:
        ds = score_gradients(p, dp, delta[None, :], threshold)
    else:
        ds = factor * (dp - delta[None, :])
    return ds
