"""The random walks of the original Pathfinder program, compiled by numba: equal random
numbers give the same dashes.

Two long curves of dashes grow in turn, then short ones fill the room that is left. Where one of
the two long curves cannot grow, both begin anew. As in that program, curves and their last
dashes may touch and cross.

An image depends on its key and its number alone. Masks hold 0 (free) to 255 (occupied).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from flashtrain_recipes.arena.pathfinder.random_numbers import begun, below, uniform
from flashtrain_recipes.arena.pathfinder.walk_tables import FULL
from flashtrain_recipes.arena.pathfinder.windows import DEGREES

DASH_TRIES = 3
TIP_TRIES = 3
DISTRACTOR_TRIES = 5
MIN_FREE = 0.01  # of the image
MIN_TOTAL = 1e-4  # of all next heads' weights together
OCCUPIED = 77  # a mask from 0.3 on keeps a curve from beginning there
# The hardest of the Arena's sides, 64, needs a few thousand; beyond this the curves
# cannot be made to fit.
MAX_ATTEMPTS = 1_000_000


@njit(cache=True, inline="always")
def _at(tables, y, x):
    return (y + tables.border) * tables.stride + x + tables.border


@njit(cache=True, inline="always")
def _inside(side, y, x):
    return 0 <= y < side and 0 <= x < side


@njit(cache=True, inline="always")
def _moved(y, x, step):
    return int(np.ceil(y + step[0])), int(np.ceil(x + step[1]))


@njit(cache=True)
def _occupy(mask, tables, y, x, direction):
    at = _at(tables, y, x)
    for place in range(tables.dash_start[direction], tables.dash_start[direction + 1]):
        pixel = at + tables.dash_pixels[place]
        mask[pixel] = max(mask[pixel], tables.dash_values[place] & tables.inside[pixel])


@njit(cache=True)
def _clear(mask, tables, y, x, direction):
    # undoes _occupy, where all else on the mask is cleared too: the pixels are
    # the empty frame's again
    at = _at(tables, y, x)
    for place in range(tables.dash_start[direction], tables.dash_start[direction + 1]):
        pixel = at + tables.dash_pixels[place]
        mask[pixel] = tables.frame[pixel]


@njit(cache=True)
def _fits(mask, tables, y, x, direction):
    at = _at(tables, y, x)
    for place in range(tables.dash_start[direction], tables.dash_start[direction + 1]):
        if tables.dash_values[place] >= tables.limits[mask[at + tables.dash_pixels[place]]]:
            return False
    return True


@njit(cache=True)
def _next_dash(mask, tables, side, pivot, direction, state, cumulative):
    # the dash after the one at `pivot` as (its pivot's y, x, its head's y, x, direction);
    # direction -1: impossible
    pivot_y, pivot_x = _moved(pivot[0], pivot[1], tables.ahead[direction])
    total = 0.0
    count = len(tables.ring)
    for number in range(count):
        weight = tables.weights[direction, number]
        y, x = pivot_y + tables.ring[number, 0], pivot_x + tables.ring[number, 1]
        if weight > 0.0 and _inside(side, y, x):
            candidate = _at(tables, y, x)
            highest = np.uint8(0)
            for step in tables.disc:
                highest = max(highest, mask[candidate + step])
                if highest == FULL:
                    break
            total += weight * tables.open_share[highest]
        cumulative[number] = total
    if total < MIN_TOTAL:
        return 0, 0, 0, 0, -1
    for _ in range(DASH_TRIES):
        wanted = uniform(state)
        number = 0
        while number < count - 1 and cumulative[number] / total <= wanted:
            number += 1
        y, x = pivot_y + tables.ring[number, 0], pivot_x + tables.ring[number, 1]
        if _fits(mask, tables, y, x, DEGREES + number):
            return pivot_y, pivot_x, y, x, DEGREES + number
    return 0, 0, 0, 0, -1


@njit(cache=True)
def _in_bounds(tables, side, y, x, degree):
    # whether a first dash's head and pivot lie in the image
    y, x = _moved(y, x, tables.to_head[degree])
    if not _inside(side, y, x):
        return False
    y, x = _moved(y, x, tables.to_pivot[degree])
    return _inside(side, y, x)


@njit(cache=True)
def _begin(tables, y, x, degree, tips, directions, pivot):
    tips[0, 0], tips[0, 1] = y, x
    directions[0] = degree
    y, x = _moved(y, x, tables.to_head[degree])
    pivot[0], pivot[1] = _moved(y, x, tables.to_pivot[degree])


@njit(cache=True)
def _first_tips(parameters, tables, state, tips, directions, pivots):
    # Makes the long curves' first dashes, and returns whether that succeeded. What the first one
    # occupies keeps twice the seed distance from every edge; the second's tip lies around the
    # first's, wherever its dash may then lie.
    side, seed_distance, padding = parameters[0], parameters[1], parameters[5]
    near = max(2 * seed_distance, padding)
    found = False
    for _ in range(TIP_TRIES):
        degree = (180 + below(state, DEGREES)) % DEGREES
        if not tables.possible[degree]:
            return False
        lowest_y, highest_y, lowest_x, highest_x = 0, 0, 0, 0
        for place in range(tables.run_start[degree], tables.run_start[degree + 1]):
            y, x, length = tables.runs[place, 0], tables.runs[place, 1], tables.runs[place, 2]
            first = place == tables.run_start[degree]
            lowest_y, highest_y = (
                y if first else min(lowest_y, y),
                y if first else max(highest_y, y),
            )
            lowest_x = x if first else min(lowest_x, x)
            highest_x = x + length - 1 if first else max(highest_x, x + length - 1)
        # Places at the image's edge, from where all of it lies outside, do not occur:
        # seed_distance is larger.
        height, width = (
            side - 2 * near - (highest_y - lowest_y),
            side - 2 * near - (highest_x - lowest_x),
        )
        if height <= 0 or width <= 0:
            return False
        chosen = below(state, height * width)
        y, x = near - lowest_y + chosen // width, near - lowest_x + chosen % width
        if _in_bounds(tables, side, y, x, degree):
            _begin(tables, y, x, degree, tips[0], directions[0], pivots[0])
            found = True
            break
    if not found:
        return False
    for _ in range(TIP_TRIES):
        degree = (180 + below(state, DEGREES)) % DEGREES
        around = below(state, DEGREES) * np.pi / 180
        y = int(np.rint(tips[0, 0, 0] + seed_distance * np.sin(around)))
        x = int(np.rint(tips[0, 0, 1] + seed_distance * np.cos(around)))
        if _in_bounds(tables, side, y, x, degree):
            _begin(tables, y, x, degree, tips[1], directions[1], pivots[1])
            return True
    return False


@njit(cache=True)
def _grow_pair(parameters, tables, state, tips, directions, mask, cumulative):
    # Two long curves, one attempt, on one mask that lacks the last dash of each: they may touch
    # and cross there. Fills tips (2, dashes, 2), directions (2, dashes) and the mask, the empty
    # frame at first, and returns how many dashes of each curve were placed, as (first, second):
    # all, where it succeeded.
    side, dashes = parameters[0], parameters[2]
    pivots = np.zeros((2, 2), dtype=np.int64)
    if not _first_tips(parameters, tables, state, tips, directions, pivots):
        return 0, 0
    for dash in range(1, dashes):
        for curve in range(2):
            last = directions[curve, dash - 1]
            pivot_y, pivot_x, y, x, direction = _next_dash(
                mask, tables, side, pivots[curve], last, state, cumulative
            )
            if direction < 0:
                return dash + curve, dash
            _occupy(mask, tables, tips[curve, dash - 1, 0], tips[curve, dash - 1, 1], last)
            pivots[curve, 0], pivots[curve, 1] = pivot_y, pivot_x
            tips[curve, dash, 0], tips[curve, dash, 1], directions[curve, dash] = y, x, direction
    return dashes, dashes


@njit(cache=True)
def _free_run(mask, side, tables, free):
    # Fills free (as mask, int16) with how many free pixels follow to the right, itself included;
    # outside of the image all are free. Returns how many of the image are.
    stride, border, count = tables.stride, tables.border, 0
    for row in range(len(mask) // stride):
        run = stride  # as free as a dash can need
        for column in range(stride - 1, -1, -1):
            at = row * stride + column
            run = 0 if mask[at] >= OCCUPIED else run + 1
            free[at] = min(run, 255)
            if run > 0 and _inside(side, row - border, column - border):
                count += 1
    return count


@njit(cache=True)
def _fitting(side, tables, free, degree, y, fits):
    # fills fits (side,) with whether a first dash from (y, x) touches nothing occupied;
    # returns of how many x
    fits[:] = True
    for place in range(tables.run_start[degree], tables.run_start[degree + 1]):
        start = _at(tables, y + tables.runs[place, 0], tables.runs[place, 1])
        length = np.int16(tables.runs[place, 2])
        row = free[start : start + side]
        for x in range(side):  # one run at a time, all x: the compiler takes many of them at once
            fits[x] &= row[x] >= length
    return fits.sum()


@njit(cache=True)
def _choose_free(side, tables, free, degree, state):
    # a tail at random, (y, x), of all whose dash touches nothing occupied; (-1,
    # -1) where there is none
    fits = np.empty(side, dtype=np.bool_)
    counts = np.empty(side, dtype=np.int64)
    for y in range(side):
        counts[y] = _fitting(side, tables, free, degree, y, fits)
    total = counts.sum()
    if total == 0:
        return -1, -1
    chosen, y = below(state, total), 0
    while chosen >= counts[y]:
        chosen -= counts[y]
        y += 1
    _fitting(side, tables, free, degree, y, fits)
    return y, np.flatnonzero(fits)[chosen]


@njit(cache=True)
def _grow_short(mask, trial, free, parameters, tables, state, tips, directions, cumulative):
    # A distractor, one attempt, its dashes into tips, directions (dashes, ...). trial: room for a
    # copy of the mask; free: _free_run's of the mask.
    side, dashes = parameters[0], parameters[4]
    pivot = np.zeros(2, dtype=np.int64)
    found = False
    for _ in range(TIP_TRIES):
        degree = (180 + below(state, DEGREES)) % DEGREES
        if not tables.possible[degree]:
            return False
        y, x = _choose_free(side, tables, free, degree, state)
        if y < 0:
            return False
        if _in_bounds(tables, side, y, x, degree):
            _begin(tables, y, x, degree, tips, directions, pivot)
            found = True
            break
    if not found:
        return False
    trial[:] = mask
    for dash in range(1, dashes):
        last = directions[dash - 1]
        pivot_y, pivot_x, y, x, direction = _next_dash(
            trial, tables, side, pivot, last, state, cumulative
        )
        if direction < 0:
            return False
        _occupy(trial, tables, tips[dash - 1, 0], tips[dash - 1, 1], last)
        pivot[0], pivot[1] = pivot_y, pivot_x
        tips[dash, 0], tips[dash, 1], directions[dash] = y, x, direction
    return True


@njit(cache=True, nogil=True)
def grow_images(key, first, parameters, margin_tables, out_tips, out_directions, out_facts):
    """Generate the images number `first`, `first` + 1, ... of the stream `key`, as many as
    the outputs have rows.

    Args:
        key, first: ImageStream.key, and the number of the first image to generate.
        parameters: (side, seed_distance, dashes of a long curve, distractors, dashes of
            a distractor, padding).
        margin_tables: WalkTables of every margin that an image may have.
        out_tips: (n, N, 2), where each of at most N dashes is drawn from, as (x, y).
        out_directions: (n, N) uint16, the number of each dash's direction.
        out_facts: (n, 5) int64: the number of dashes, the label, which long curve's first tip is
            marked, the index of the margin's tables, and the attempts that it took (0: none
            succeeded, and this and all later images are missing).
    """
    side, _, dashes, distractors, short, _ = parameters
    for image in range(len(out_tips)):
        state = begun(key, first + image)
        label = below(state, 2)
        chosen = below(state, len(margin_tables)) if len(margin_tables) > 1 else 0
        tables = margin_tables[chosen]
        cumulative = np.zeros(len(tables.ring))
        tips = np.zeros((2, dashes, 2), dtype=np.int64)
        directions = np.zeros((2, dashes), dtype=np.int64)
        mask = tables.frame.copy()
        attempts, succeeded = 0, False
        while attempts < MAX_ATTEMPTS and not succeeded:
            attempts += 1
            placed = _grow_pair(parameters, tables, state, tips, directions, mask, cumulative)
            succeeded = placed[0] == dashes and placed[1] == dashes
            if not succeeded:
                for curve in range(2):
                    for dash in range(placed[curve]):
                        _clear(
                            mask,
                            tables,
                            tips[curve, dash, 0],
                            tips[curve, dash, 1],
                            directions[curve, dash],
                        )
        out_facts[image, 1], out_facts[image, 3] = label, chosen
        out_facts[image, 4] = attempts if succeeded else 0
        if not succeeded:
            return  # the next image would not fit either
        count = 0
        for curve in range(2):
            for dash in range(dashes):
                _put(
                    out_tips[image],
                    out_directions[image],
                    count,
                    tips[curve, dash],
                    directions[curve, dash],
                )
                count += 1
        # Of the last dashes, only the second curve's keeps the distractors away.
        _occupy(
            mask, tables, tips[1, dashes - 1, 0], tips[1, dashes - 1, 1], directions[1, dashes - 1]
        )
        trial, free = mask.copy(), np.zeros(len(mask), dtype=np.int16)
        share = _free_run(mask, side, tables, free) / (side * side)
        for _ in range(distractors):
            for _ in range(DISTRACTOR_TRIES):
                if share < MIN_FREE:
                    below(state, DEGREES)  # the program chooses a direction before it looks
                    continue
                if _grow_short(
                    mask, trial, free, parameters, tables, state, tips[0], directions[0], cumulative
                ):
                    for dash in range(short):
                        _occupy(
                            mask, tables, tips[0, dash, 0], tips[0, dash, 1], directions[0, dash]
                        )
                        _put(
                            out_tips[image],
                            out_directions[image],
                            count,
                            tips[0, dash],
                            directions[0, dash],
                        )
                        count += 1
                    share = _free_run(mask, side, tables, free) / (side * side)
                    break
        out_facts[image, 0] = count
        out_facts[image, 2] = below(state, 2)


@njit(cache=True)
def _put(tips, directions, number, tip, direction):
    tips[number, 0], tips[number, 1] = tip[1], tip[0]
    directions[number] = direction
