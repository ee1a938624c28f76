"""What a consumer of the fused backward makes of a tile's products at D = 64 and D = 128: weights and their gradients.

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
    """A warpgroup's keys, (64, 1), and their positions."""
    key = first_key + WG * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    position = key
    if C.key_positions:
        position = gl.load(masks.positions + key, mask=key < walk.bounds.seqlen_k, other=-2147483648)
    return key, position


@gluon.jit
def changes_of_item(keys, walk, masks, head_place, call, notes, C: gl.constexpr):
    """ALiBi's slope, and dropout's threshold and draws, for the first head of the group; zeros without."""
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
    """Products -> exponents of the weights, with all that changes or hides them; and the slope of the step's head."""
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
    """(P, with dropout marked; P for its product; what dP - delta is multiplied by; the draws of the step's head)."""
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
    """dS of a tile."""
    delta = rows.slice(BLOCK_Q, BLOCK_Q).load(gl.SliceLayout(0, LAYOUT))
    if C.dropout:
        ds = score_gradients(p, dp, delta[None, :], threshold)
    else:
        ds = factor * (dp - delta[None, :])
    return ds
