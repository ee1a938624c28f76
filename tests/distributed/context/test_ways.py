"""Which way is taken, what it moves, and what is refused."""

from __future__ import annotations

import pytest
import torch

from flashtrain.distributed.context.layout import balanced
from flashtrain.distributed.context.ways import choose_for, choose_way, traffic
from flashtrain.errors import UserError
from flashtrain_kernels import masks

GPT2 = {"heads": 12, "kv_heads": 12, "head_dim": 64, "held": 16384}


@pytest.mark.parametrize(
    ("degree", "heads", "kv_heads", "way"),
    [
        (4, 12, 12, "all-to-all"),  # heads divide
        (8, 12, 12, "hybrid"),  # 4 x 2
        (8, 32, 1, "all-gather"),  # one key head is little to gather
        (7, 12, 12, "all-gather"),  # no common divisor, and short
        (2, 12, 12, "ring"),
        (1, 12, 12, "all-to-all"),
    ],
)
def test_auto_takes_a_ring_on_two_ranks_else_what_moves_least_and_says_why(degree, heads, kv_heads, way):
    choice = choose_way("auto", degree=degree, heads=heads, kv_heads=kv_heads, head_dim=64, held=16384)
    assert choice.way == way
    assert choice.reason.startswith(way)
    assert "\n" not in choice.reason


@pytest.mark.parametrize(
    ("way", "length", "dropout", "chosen"),
    [
        ("auto", 64, False, "all-gather"),  # four documents on four ranks
        ("all-gather", 64, False, "all-gather"),
        ("ring", 64, False, "ring"),
        ("auto", 64, True, "all-to-all"),
        ("auto", 256, False, "all-to-all"),  # one document
    ],
)
def test_where_little_is_seen_of_other_ranks_keys_only_that_is_gathered(way, length, dropout, chosen):
    mask = masks.document(torch.arange(256)[None] // length, causal=True)
    choice, _, needed = choose_for(mask, balanced(mask, 4), way, dropout=dropout, **{**GPT2, "held": 64})
    assert choice.way == chosen
    assert (needed is not None) == (chosen == "all-gather")
    if needed is not None:
        assert "of the 0% of other ranks' keys that are seen" in choice.reason
        assert choice.traffic.total == 0


def test_auto_takes_a_ring_where_gathering_is_too_much_and_heads_do_not_divide():
    choice = choose_way("auto", degree=7, heads=12, kv_heads=12, head_dim=128, held=2**20)
    assert choice.way == "ring"
    assert "GiB" in choice.reason


@pytest.mark.parametrize(
    ("way", "degree", "message"),
    [
        ("all-to-all", 8, r"all-to-all with 12 heads on 8 ranks\. Use a degree .*\(2, 3, 4, 6, 12\), or hybrid"),
        ("hybrid", 4, "or all-to-all, all-gather or ring on 4"),
        ("hybrid", 5, "share none of their divisors"),
        ("rign", 4, "unknown context-parallel method 'rign'. Did you mean 'ring'"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(way, degree, message):
    with pytest.raises(UserError, match=message):
        choose_way(way, degree=degree, **GPT2)


def test_traffic_is_what_is_sent():
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": 16, "bytes_each": 2}
    one = 100 * 16 * 2  # a head of the tokens held
    # Three of the four quarters of q, out, and of keys and values repeated to four heads leave a rank.
    assert traffic(100, 4, 4, False, **sizes).forward == 3 / 4 * (8 + 8 + 4 + 4) * one
    assert traffic(100, 4, 1, False, **sizes).forward == 3 * 2 * 2 * one
    assert traffic(100, 4, 1, True, **sizes).forward == 3 * 2 * 2 * one
    # Gradients of keys and values are float32, and go round once more to come home.
    assert traffic(100, 4, 1, False, **sizes).backward == (3 * 2 * 2 + 4 * 2 * 2 * 2) * one
    assert traffic(100, 4, 1, True, **sizes).backward == (3 * 2 * 2 + 3 * 2 * 2 * 2) * one
