"""The deterministic backward on Hopper GPUs: its items add to every tile of dQ one after the other, and none waits for
ever. The kernel's own arithmetic, as plain Python."""

import importlib.util
import random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


class Shape(NamedTuple):
    """all_heads: of keys, in all rows. left, right: of Options. together: heads whose items are sorted together."""

    seqlen_q: int
    seqlen_k: int
    all_heads: int
    group: int
    left: int | None
    right: int | None
    together: int


@st.composite
def shapes(draw: Any) -> Shape:
    seqlen_q, seqlen_k = draw(st.integers(1, 900)), draw(st.integers(1, 1500))
    diagonal = seqlen_k - seqlen_q
    left = draw(st.none() | st.integers(-700, 200).map(lambda x: x + diagonal))
    right = draw(st.none() | st.just(diagonal) | st.integers(-200, 700).map(lambda x: x + diagonal))
    if left is not None and right is not None and left > right:
        left, right = right, left
    return Shape(
        seqlen_q, seqlen_k, draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 3])), left, right,
        draw(st.sampled_from([1, 2, 4, 32])),
    )  # fmt: skip


def turns(shape: Shape) -> list[list[tuple[int, int]]]:
    """Of each item, in the order of their numbers: (the tile's place in dQ's workspace, how many add before it)."""
    from plain_jit import Integer, plain

    from flashtrain_kernels.backends.hopper import backward_kernel
    from flashtrain_kernels.backends.hopper import backward_schedule as schedule
    from flashtrain_kernels.backends.portable.tiles import Bounds

    c = backward_kernel.Choices(
        stages=3, group=shape.group, left=shape.left is not None, right=shape.right is not None, deterministic=True
    )
    query_tiles, key_tiles = -(-shape.seqlen_q // 64), -(-shape.seqlen_k // 128)
    call = schedule.Call(
        1.0, shape.all_heads * shape.group, Bounds(shape.seqlen_q, shape.seqlen_k, shape.left or 0, shape.right or 0),
        query_tiles, key_tiles, shape.all_heads, shape.together, None, 0, 0, None, None, None, None,
    )  # fmt: skip
    asis = {"opaque": lambda x: x}
    work_of, tile_of, next_step, first_step, items_before = (
        plain(getattr(schedule, name), **asis)
        for name in ("work_of", "tile_of", "next_step", "first_step", "items_before")
    )
    found = []
    for item in range(key_tiles * shape.all_heads):
        walk, _masks, _first_key, head_place = work_of(Integer(item), call, None, c)
        count, member, tiles = first_step(walk, c.kind, c.tiles, c.group)
        i, visits = 0, []
        for _ in range(count):
            tile, _masked = tile_of(i, member, walk, c.kind, c.tiles, True)
            assert 0 <= tile < query_tiles
            place = (head_place + member) * query_tiles + tile
            visits.append((place, items_before(tile, walk, c)))
            i, member, tiles = next_step(i, member, tiles, walk, c.kind, c.tiles, c.group, True)
        assert len({place for place, _ in visits}) == len(visits)
        found.append(visits)
    return found


@settings(max_examples=150, deadline=None)
@given(shape=shapes())
def test_the_items_of_a_tile_of_dq_take_turns_in_the_order_of_their_numbers(shape):
    added: dict[int, int] = {}
    for visits in turns(shape):
        for place, before in visits:  # so whom it waits for has a lower number, each has a turn, and no turn is empty
            assert before == added.get(place, 0)
            added[place] = before + 1


@settings(max_examples=60, deadline=None)
@given(shape=shapes(), resident=st.integers(1, 9), seed=st.integers(0, 2**32))
def test_no_item_waits_for_ever_however_few_run_at_once_and_however_fast_each_is(shape, resident, seed):
    chance, waiting = random.Random(seed), iter(turns(shape))
    added: dict[int, int] = {}
    running: list[list[tuple[int, int]]] = []
    while True:
        while len(running) < resident and (visits := next(waiting, None)) is not None:
            running.append(list(visits))
        if not running:
            break
        able = [visits for visits in running if not visits or added.get(visits[0][0], 0) >= visits[0][1]]
        assert able, "all wait for each other"
        visits = chance.choice(able)
        if visits:
            place, before = visits.pop(0)
            assert added.get(place, 0) == before, "two add at once"
            added[place] = before + 1
        else:
            running.remove(visits)


@settings(max_examples=60, deadline=None)
@given(shape=shapes())
def test_every_visible_pair_is_in_a_tile_that_its_item_visits(shape):
    query_tiles, key_tiles = -(-shape.seqlen_q // 64), -(-shape.seqlen_k // 128)
    heads = shape.all_heads * shape.group
    counted = [0] * (heads * query_tiles)
    for visits in turns(shape):
        for place, _ in visits:
            counted[place] += 1
    for tile in range(query_tiles):
        first, last = tile * 64, min(tile * 64 + 64, shape.seqlen_q) - 1
        low = 0 if shape.left is None else first + shape.left
        high = shape.seqlen_k - 1 if shape.right is None else last + shape.right
        low, high = max(low, 0), min(high, shape.seqlen_k - 1)
        needed = high // 128 - low // 128 + 1 if low <= high else 0
        assert all(counted[head * query_tiles + tile] >= needed for head in range(heads))
    assert key_tiles > 0
