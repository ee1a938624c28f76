"""The order of the Hopper backward's work items: a model of a GPU that starts the next
item where one has ended."""

import heapq
import statistics
from itertools import product

import pytest
import torch

from flashtrain_kernels.backends.hopper import backward
from flashtrain_kernels.options import Options

MULTIPROCESSORS = 132
LENGTHS = (1024, 2048, 4096, 8192, 16384, 65536)
HEADS = (
    (12, 12),
    (16, 16),
    (20, 20),
    (32, 32),
    (12, 2),
    (16, 2),
    (28, 4),
    (24, 8),
    (32, 8),
    (64, 8),
)
SHAPES = [
    (batch, heads, kv_heads, seqlen)
    for batch, (heads, kv_heads), seqlen in product((1, 2, 4, 16), HEADS, LENGTHS)
    if batch * seqlen <= 131072
]


@pytest.fixture(autouse=True)
def gpu_of_132_multiprocessors(monkeypatch):
    monkeypatch.setattr(backward, "multiprocessors", lambda device: MULTIPROCESSORS)


def causal(**changes):
    return Options(scale=1.0, left=None, right=0, **changes)


def order(batch, heads, kv_heads, seqlen, head_dim=128):
    """(split, heads sorted together) of a causal call."""
    q, k = (torch.empty(batch, seqlen, n, head_dim, device="meta") for n in (heads, kv_heads))
    key_tiles = -(-seqlen // 128)
    split = backward.splits_of_group(key_tiles * batch * kv_heads, q, k, causal())
    return split, backward.heads_together(key_tiles, batch * kv_heads * split, head_dim, causal())


def useful_share(batch, heads, kv_heads, seqlen, split, together):
    """The share of the multiprocessors' time that is work; an item costs its tiles of queries
    and 1.5 for its start."""
    key_tiles, free, work = -(-seqlen // 128), [0.0] * MULTIPROCESSORS, 0.0
    for _group in range(batch * kv_heads * split // together):
        for key_tile in range(key_tiles):
            cost = (seqlen // 64 - 2 * key_tile) * (heads // kv_heads // split) + 1.5
            for _head in range(together):
                heapq.heappush(free, heapq.heappop(free) + cost)
                work += cost
    return work / max(free) / MULTIPROCESSORS


def test_heads_are_sorted_in_groups_that_divide_them_evenly():
    for batch, heads, kv_heads, seqlen in SHAPES:
        split, together = order(batch, heads, kv_heads, seqlen)
        assert (batch * kv_heads * split) % together == 0


def test_multiprocessors_are_kept_busy():
    shares = {shape: useful_share(*shape, *order(*shape)) for shape in SHAPES}
    # Where the query heads themselves are fewer than multiprocessors can share, no order helps.
    enough = {
        shape: x
        for shape, x in shares.items()
        if shape[0] * shape[1] * shape[3] // 128 >= 3 * MULTIPROCESSORS
    }
    assert len(shares) > 200
    assert len(enough) > 180
    assert statistics.mean(enough.values()) > 0.98
    assert min(enough.values()) > 0.93, min(enough, key=enough.__getitem__)


def test_query_heads_are_split_where_key_heads_are_few_or_their_groups_large():
    assert [order(1, 12, 2, 8192)[0], order(1, 28, 4, 4096)[0], order(1, 32, 8, 2048)[0]] == [
        2,
        7,
        2,
    ]
    assert [order(1, 64, 8, 8192)[0], order(4, 64, 8, 1024)[0]] == [2, 2]
    assert [order(1, 32, 8, 8192)[0], order(1, 16, 16, 1024)[0]] == [1, 1]


def test_parts_of_dk_and_dv_take_at_most_a_quarter_of_a_gigabyte_beyond_what_two_rounds_need():
    for batch, heads, kv_heads, seqlen in [*SHAPES, (1, 64, 8, 1 << 20), (1, 28, 4, 1 << 20)]:
        split, _ = order(batch, heads, kv_heads, seqlen)
        items = batch * kv_heads * -(-seqlen // 128)
        parts = split * items * 2 * 128 * 128 * 4
        assert split == 1 or parts <= 1 << 28 or items < 2 * MULTIPROCESSORS
