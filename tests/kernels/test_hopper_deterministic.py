"""The order in which the Hopper kernels add dQ up for a deterministic call: by the kernels'
own arithmetic, on a CPU.

B K heads of keys, each with `group` query heads; items are 128 keys, tiles 64 queries. At D = 256
dQ has a kernel of its own, whose programs have 128 queries of a head and whose tiles are 64 keys.
"""

import importlib.util
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_formula import window_pairs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

BOUND = st.none() | st.integers(-900, 900)


class Item:
    """What a program does. places: of the workspace, step by step. needed: how many steps the
    counter `before` must be at for each; `counter` is its own."""

    def __init__(self, number, call, choices, replaced):
        from plain_jit import Integer, plain

        from flashtrain_kernels.backends.hopper import backward_schedule

        work_of, first_step, tile_of, next_step, steps_behind, counter_of = (
            plain(getattr(backward_schedule, name), **replaced)
            for name in (
                "work_of",
                "first_step",
                "tile_of",
                "next_step",
                "steps_behind",
                "counter_of",
            )
        )
        walk, _masks, first_key, head_place = work_of(Integer(number), call, None, choices)
        self.counter = counter_of(first_key, walk, head_place, call, choices)
        self.before = self.counter - 1
        behind = steps_behind(walk, first_key, choices)
        count, member, tiles = first_step(walk, choices)
        self.first_key, self.walk = walk.keys_at + first_key, walk
        self.places, self.tiles, self.needed, i = [], [], [], 0
        for j in range(count):
            tile, _masked = tile_of(i, member, walk, choices)
            assert 0 <= tile < call.query_tiles
            self.tiles.append(tile)
            self.places.append((head_place + member) * call.query_tiles + tile)
            self.needed.append(j + 1 - behind)
            i, member, tiles = next_step(i, member, tiles, walk, choices)
        assert len(set(self.places)) == count


def items_of(seqlen_q, seqlen_k, left, right, batch=1, kv_heads=1, group=1, together=1):
    from flashtrain_kernels.backends.hopper import backward_kernel, backward_schedule
    from flashtrain_kernels.backends.portable.tiles import Bounds

    choices = backward_kernel.Choices(
        stages=3, group=group, left=left is not None, right=right is not None, deterministic=True
    )
    bounds = Bounds(seqlen_q, seqlen_k, left or 0, right or 0)
    query_tiles, key_tiles = -(-seqlen_q // 64), -(-seqlen_k // 128)
    call = backward_schedule.Call(
        1.0, kv_heads * group, bounds, query_tiles, key_tiles, batch * kv_heads, together, None,
        None, None, None,
        None, None, None,
    )  # fmt: skip
    return [
        Item(number, call, choices, {"opaque": lambda x: x})
        for number in range(key_tiles * batch * kv_heads)
    ]


def visible(seqlen_q, seqlen_k, left, right):
    distance = np.arange(seqlen_k)[None, :] - np.arange(seqlen_q)[:, None]
    return (distance >= (-np.inf if left is None else left)) & (
        distance <= (np.inf if right is None else right)
    )


def run(items, processors, made):
    """Run the programs as some GPU might: started in the order of their numbers, each as fast as it
    likes. The items that added to each place, in their order."""
    counters, added = {}, {}
    waiting, running = list(enumerate(items))[::-1], []
    while waiting or running:
        while waiting and len(running) < processors:
            running.append([waiting.pop()[1], 0])
        made.shuffle(running)
        for at, (item, step) in enumerate(running):
            if step == len(item.places):
                break
            if item.needed[step] <= 0 or counters.get(item.before, 0) >= item.needed[step]:
                added.setdefault(item.places[step], []).append(item.first_key)
                counters[item.counter] = running[at][1] = step + 1
                break
        else:
            raise AssertionError("they wait for each other")
        if step == len(item.places):
            running.pop(at)
    return added


@settings(max_examples=120)
@given(
    seqlen_q=st.integers(1, 900), seqlen_k=st.integers(1, 900), left=BOUND, right=BOUND,
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2), group=st.sampled_from([1, 1, 3]), together=st.integers(1, 5),
    processors=st.integers(1, 20), seed=st.integers(0, 1000),
)  # fmt: skip
def test_every_tile_of_dq_is_added_up_in_one_order_and_nobody_waits_for_ever(
    seqlen_q, seqlen_k, left, right, batch, kv_heads, group, together, processors, seed
):
    items = items_of(seqlen_q, seqlen_k, left, right, batch, kv_heads, group, together)
    added = run(items, processors, random.Random(seed))
    seen = visible(seqlen_q, seqlen_k, left, right)
    query_tiles = -(-seqlen_q // 64)
    for place in range(batch * kv_heads * group * query_tiles):
        rows = seen[place % query_tiles * 64 :][:64]
        keys = added.get(place, [])
        assert keys == sorted(keys)
        assert set(keys) >= {
            first for first in range(0, seqlen_k, 128) if rows[:, first : first + 128].any()
        }
    assert {item.counter for item in items} == set(range(len(items)))


@settings(max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), min_size=1, max_size=5),
    window=st.tuples(st.integers(-1, 300), st.integers(-1, 300)), group=st.sampled_from([1, 2]),
    together=st.integers(1, 3), processors=st.integers(1, 20), seed=st.integers(0, 1000),
)  # fmt: skip
def test_so_is_that_of_packed_sequences(lengths, window, group, together, processors, seed):
    from plain_jit import packed_call

    from flashtrain_kernels.backends.hopper import backward_kernel

    cu_q, cu_k = (np.cumsum([0, *ends]) for ends in zip(*lengths, strict=True))
    totals = max(1, int(cu_q[-1])), max(1, int(cu_k[-1]))
    choices = backward_kernel.Choices(
        stages=3,
        group=group,
        left=window[0] >= 0,
        right=window[1] >= 0,
        packed=True,
        deterministic=True,
    )
    call, replaced = packed_call(cu_q, cu_k, *totals, window, 2 * group, 2, together)
    items = [Item(each, call, choices, replaced) for each in range(2 * call.key_tiles)]
    added = run(items, processors, random.Random(seed))
    visible = sum(  # of each sequence, pairs of a tile and an item with something to see
        bool(window_pairs(q, k, *window)[a : a + 64, b : b + 128].any())
        for q, k in lengths
        for a in range(0, q, 64)
        for b in range(0, k, 128)
    )
    assert sum(map(len, added.values())) >= 2 * group * visible
    assert all(keys == sorted(set(keys)) for keys in added.values())
    assert {item.counter for item in items} == set(range(len(items)))


def test_items_that_start_together_wait_only_when_they_start():
    """Each step takes one unit, an addition is seen `lag` later. Under a causal mask,
    grouped heads included, an item's last step is no later than its number of steps and the
    lags of those before it."""
    lag = 1.5
    for group in (1, 4):
        ends, done = {}, {}
        for item in items_of(2048, 2048, None, 0, group=group):
            now = 0.0
            for step, needed in enumerate(item.needed):
                before = done.get((item.before, needed), 0.0) + lag if needed > 0 else 0.0
                now = max(now + 1, before)
                done[item.counter, step + 1] = now
            ends[item.first_key] = now - len(item.needed)
        assert all(late <= lag * (key // 128) for key, late in ends.items())


@settings(max_examples=120)
@given(
    seqlen_q=st.integers(1, 900), seqlen_k=st.integers(1, 900), left=BOUND, right=BOUND,
    batch=st.integers(1, 2),
    heads=st.integers(1, 3), together=st.integers(1, 6),
)  # fmt: skip
def test_at_d_256_a_program_has_queries_of_its_own_and_visits_all_that_they_see(
    seqlen_q, seqlen_k, left, right, batch, heads, together
):
    from plain_jit import plain

    from flashtrain_kernels.backends.hopper import (
        backward_dq_d256,
        backward_kernel,
        forward_masks,
    )
    from flashtrain_kernels.backends.portable.launch import Features
    from flashtrain_kernels.backends.portable.tiles import Bounds

    bounds, tiles = Bounds(seqlen_q, seqlen_k, left or 0, right or 0), -(-seqlen_q // 128)
    call = backward_dq_d256.Call(
        1.0, heads, tiles, None, batch * heads, together, None, None, None, None
    )
    choices, mask = backward_kernel.Choices(stages=2), forward_masks.MaskTables(*[None] * 6)
    f = Features(left=left is not None, right=right is not None)
    work, pieces_of, place = map(
        plain, (backward_dq_d256._work, backward_dq_d256._pieces, forward_masks.place)
    )
    seen = visible(seqlen_q, seqlen_k, left, right)
    programs = [
        work(number, call, bounds, mask, None, choices) for number in range(tiles * batch * heads)
    ]
    assert sorted(program[:3] for program in programs) == [
        (b, h, tile * 128) for b in range(batch) for h in range(heads) for tile in range(tiles)
    ]
    for item in programs:
        pieces, steps = pieces_of(item, mask, f)
        visited = [place(step, pieces, None, f, 1, 64) for step in range(steps)]
        assert len({*visited}) == steps
        for key in range(0, seqlen_k, 64):
            pairs = seen[item.first : item.first + 128, key:][:, :64]
            assert key in visited or not pairs.any()
            if key in visited[pieces.masked :]:
                assert pairs.all()
                assert pairs.shape[1] == 64
