"""The random walks of drawing=smooth, compiled by numba, and the random numbers of both drawings' walks.

Two long curves of dashes grow in turn, then short ones fill the room that is left. A curve never enters the margin of
another dash. Where one of the two long curves cannot grow, both begin anew: what images look like depends on that.

An image depends on its key and its number alone: nothing is carried from one image to the next. Masks hold 0 (free) to
255 (occupied). Two masks are kept while the long curves grow, each without the last dash of the curve that it blocks:
consecutive dashes of a curve may touch one another's margin.

Random numbers are SplitMix64 (Steele, Lea, Flood 2014), a stream for each image of each key.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from flashtrain_recipes.arena.pathfinder.tables import DEGREES, FULL

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@njit(cache=True, inline="always")
def _mixed(value):
    """Its output function: a bijection of 64-bit words that looks random."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


@njit(cache=True, inline="always")
def begun(key, number):
    """The state (1,) uint64 of stream `number` of `key`, at its beginning."""
    state = np.zeros(1, dtype=np.uint64)
    state[0] = _mixed(key ^ _mixed(np.uint64(number) + _GAMMA))
    return state


@njit(cache=True, inline="always")
def uniform(state):
    """A float64 in [0, 1); the state is moved on."""
    state[0] += _GAMMA
    return (_mixed(state[0]) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit(cache=True, inline="always")
def below(state, count):
    """A whole number in [0, count)."""
    return int(uniform(state) * count)


# A dash must not enter occupied pixels by more than antialiased rims: mask + dash stays below 1.8 of full.
COLLISION = int(1.8 * FULL)
TRIES_A_DASH = 3
TRIES_A_TIP = 3
TRIES_A_DISTRACTOR = 5
LEAST_FREE = 0.01
# The hardest of the Arena's sides, 64, needs a few thousand; beyond this the curves cannot be made to fit.
MOST_ATTEMPTS = 1_000_000


@njit(cache=True)
def _fits(mask, tables, head, direction):
    """Whether the dash that ends in `head` stays out of what is occupied."""
    for place in range(tables.dash_start[direction], tables.dash_start[direction + 1]):
        if int(mask[head + tables.dash_pixels[place]]) + int(tables.dash_values[place]) >= COLLISION:
            return False
    return True


@njit(cache=True)
def _occupy(mask, tables, head, direction):
    for place in range(tables.dash_start[direction], tables.dash_start[direction + 1]):
        at = head + tables.dash_pixels[place]
        mask[at] = max(mask[at], tables.dash_values[place])


@njit(cache=True)
def _clear(mask, tables, head, direction):
    """Undo _occupy, where all else on the mask is cleared too: the pixels are the empty frame's again."""
    for place in range(tables.dash_start[direction], tables.dash_start[direction + 1]):
        at = head + tables.dash_pixels[place]
        mask[at] = tables.frame[at]


@njit(cache=True)
def _next_dash(mask, tables, head, direction, state, cumulative):
    """The dash after the one that ends in `head`, as (head, direction); (-1, -1) where none is possible."""
    pivot = head + tables.ahead[direction]
    total = 0.0
    count = tables.follower_count[direction]
    for number in range(count):
        candidate = pivot + tables.ring[tables.followers[direction, number]]
        highest = np.uint8(0)
        for step in tables.disc:
            highest = max(highest, mask[candidate + step])
            if highest == FULL:
                break
        total += tables.follower_weights[direction, number] * ((FULL - int(highest)) / FULL)
        cumulative[number] = total
    if total <= 0.0:
        return -1, -1
    for _ in range(TRIES_A_DASH):
        wanted = uniform(state) * total
        number = 0
        while number < count - 1 and cumulative[number] <= wanted:
            number += 1
        follower = tables.followers[direction, number]
        found, turned = pivot + tables.ring[follower], DEGREES + follower
        if _fits(mask, tables, found, turned):
            return found, turned
    return -1, -1


@njit(cache=True)
def _grow_pair(parameters, tables, state, heads, directions, masks, cumulative):
    """Two long curves, one attempt. heads, directions: (2, dashes), filled; masks (2, ...): the empty frame at first.

    Returns how many dashes of each curve were placed, as (first, second): all, where it succeeded.
    """
    side, seed_distance, dashes = parameters[0], parameters[1], parameters[2]
    near, room = 2 * seed_distance, side - 4 * seed_distance
    for attempt in range(TRIES_A_TIP):
        x, y = near + below(state, room), near + below(state, room)
        first_tail = (y + tables.border) * tables.stride + x + tables.border
        directions[0, 0] = below(state, DEGREES)
        heads[0, 0] = first_tail + tables.first_step[directions[0, 0]]
        if _fits(tables.frame, tables, heads[0, 0], directions[0, 0]):
            break
        if attempt == TRIES_A_TIP - 1:
            return 0, 0
    around = below(state, DEGREES)
    directions[1, 0] = below(state, DEGREES)
    angle = around * (2.0 * np.pi / DEGREES)
    x += int(np.rint(seed_distance * np.cos(angle)))
    y += int(np.rint(seed_distance * np.sin(angle)))
    heads[1, 0] = (y + tables.border) * tables.stride + x + tables.border + tables.first_step[directions[1, 0]]
    if not _fits(tables.frame, tables, heads[1, 0], directions[1, 0]):
        return 0, 0
    for curve in range(2):  # each blocks the other
        _occupy(masks[1 - curve], tables, heads[curve, 0], directions[curve, 0])
    for dash in range(1, dashes):
        for curve in range(2):
            head, direction = _next_dash(
                masks[curve], tables, heads[curve, dash - 1], directions[curve, dash - 1], state, cumulative
            )
            if head < 0:
                return dash + curve, dash
            heads[curve, dash], directions[curve, dash] = head, direction
            _occupy(masks[curve], tables, heads[curve, dash - 1], directions[curve, dash - 1])
            _occupy(masks[1 - curve], tables, head, direction)
    return dashes, dashes


@njit(cache=True)
def _grow_short(mask, trial, parameters, tables, state, heads, directions, cumulative):
    """A distractor, one attempt, its dashes into heads, directions (dashes,). trial: room for a copy of the mask."""
    side, dashes = parameters[0], parameters[4]
    at = 0
    while True:  # at least LEAST_FREE of the image is free
        x, y = below(state, side), below(state, side)
        at = (y + tables.border) * tables.stride + x + tables.border
        if mask[at] == 0:
            break
    directions[0] = below(state, DEGREES)
    heads[0] = at + tables.first_step[directions[0]]
    if not _fits(mask, tables, heads[0], directions[0]):
        return False
    trial[:] = mask
    for dash in range(1, dashes):
        head, direction = _next_dash(trial, tables, heads[dash - 1], directions[dash - 1], state, cumulative)
        if head < 0:
            return False
        _occupy(trial, tables, heads[dash - 1], directions[dash - 1])
        heads[dash], directions[dash] = head, direction
    return True


@njit(cache=True)
def _free_share(mask, side, tables):
    free = 0
    for y in range(side):
        row = (y + tables.border) * tables.stride + tables.border
        for x in range(side):
            free += mask[row + x] == 0
    return free / (side * side)


@njit(cache=True)
def grow_images(key, first, parameters, margin_tables, out_heads, out_angles, out_facts):
    """Images number `first`, `first` + 1, ... of the stream `key`, as many as the outputs have rows.

    parameters: (side, seed_distance, dashes of a long curve, distractors, dashes of a distractor).
    margin_tables: WalkTables of every margin that an image may have. out_heads: (n, N, 2), the dashes' heads as (x, y);
    out_angles: (n, N) uint16, their angle codes. out_facts: (n, 5) int64: dashes, label, the curve whose first tip is
    marked, which margin, attempts (0: none succeeded, and nothing was made from there on).
    """
    side, _, dashes, distractors, short = parameters
    for image in range(len(out_heads)):
        state = begun(key, first + image)
        label, start = below(state, 2), below(state, 2)
        chosen = below(state, len(margin_tables))
        tables = margin_tables[chosen]
        cumulative = np.zeros(tables.followers.shape[1])
        heads = np.zeros((2, dashes), dtype=np.int64)
        directions = np.zeros((2, dashes), dtype=np.int64)
        masks = np.empty((2, len(tables.frame)), dtype=np.uint8)
        masks[0], masks[1] = tables.frame, tables.frame
        attempts, succeeded = 0, False
        while attempts < MOST_ATTEMPTS and not succeeded:
            attempts += 1
            placed = _grow_pair(parameters, tables, state, heads, directions, masks, cumulative)
            succeeded = placed[0] == dashes and placed[1] == dashes
            if not succeeded:
                for curve in range(2):
                    for dash in range(placed[curve]):
                        for blocked in range(2):
                            _clear(masks[blocked], tables, heads[curve, dash], directions[curve, dash])
        out_facts[image, 0] = 0
        out_facts[image, 1], out_facts[image, 2], out_facts[image, 3] = label, start, chosen
        out_facts[image, 4] = attempts if succeeded else 0
        if not succeeded:
            return  # the next image would not fit either
        count = 0
        for curve in range(2):
            for dash in range(dashes):
                _put(out_heads[image], out_angles[image], count, heads[curve, dash], directions[curve, dash], tables)
                count += 1
        mask = masks[0]  # all but the last dash of the first curve
        _occupy(mask, tables, heads[0, dashes - 1], directions[0, dashes - 1])
        trial = masks[1]
        for _ in range(distractors):
            if _free_share(mask, side, tables) < LEAST_FREE:
                break
            for _ in range(TRIES_A_DISTRACTOR):
                if _grow_short(mask, trial, parameters, tables, state, heads[0], directions[0], cumulative):
                    for dash in range(short):
                        _occupy(mask, tables, heads[0, dash], directions[0, dash])
                        _put(out_heads[image], out_angles[image], count, heads[0, dash], directions[0, dash], tables)
                        count += 1
                    break
        out_facts[image, 0] = count


@njit(cache=True)
def _put(heads, angles, number, head, direction, tables):
    heads[number, 0] = head % tables.stride - tables.border
    heads[number, 1] = head // tables.stride - tables.border
    angles[number] = tables.angle_codes[direction]
