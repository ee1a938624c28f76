"""Which context-parallel method is taken, what it sends, and what is refused."""

from __future__ import annotations

import pytest
import torch

from flashtrain.distributed.context.layouts import balanced
from flashtrain.distributed.context.methods import choose_method, gather_needed
from flashtrain.distributed.context.traffic import Sizes, traffic
from flashtrain.errors import UserError
from flashtrain_kernels import masks

HELD = 16384


@pytest.mark.parametrize(
    ("degree", "heads", "kv_heads", "method"),
    [
        (4, 12, 12, "ulysses"),  # heads divide
        (8, 12, 12, "hybrid"),  # 4 x 2
        (8, 32, 1, "all-gather"),  # one key head is little to gather
        (7, 12, 12, "ring"),  # no common divisor
        (2, 12, 12, "ring"),
        (7, 768, 768, "ring"),  # no common divisor, and much to gather
        (1, 12, 12, "ulysses"),
    ],
)
def test_auto_takes_a_ring_on_two_ranks_else_what_moves_least_and_reports_why(
    degree, heads, kv_heads, method
):
    choice = choose_method("auto", Sizes(degree, heads, kv_heads, 64, HELD))
    assert choice.method == method
    assert choice.why
    assert "\n" not in choice.why


@pytest.mark.parametrize(
    ("method", "length", "chosen"),
    [
        ("auto", 64, "all-gather"),  # four documents on four ranks
        ("all-gather", 64, "all-gather"),
        ("ring", 64, "ring"),
        ("auto", 256, "ulysses"),  # one document
    ],
)
def test_where_little_is_seen_of_other_ranks_keys_only_that_is_gathered(method, length, chosen):
    mask = masks.document(torch.arange(256)[None] // length, causal=True)
    usual = choose_method(method, Sizes(4, 12, 12, 64, 64))
    choice, needed = gather_needed(usual, method, mask, balanced(mask, 4))
    assert choice.method == chosen
    assert (needed is not None) == (chosen == "all-gather")
    if needed is not None:
        assert "of the 0% of other ranks' keys that are seen" in choice.why
        assert choice.traffic.total == 0


@pytest.mark.parametrize(
    ("method", "degree", "message"),
    [
        ("ulysses", 8, r"ulysses with 12 heads on 8 ranks\. Use .* or hybrid, .* 2, 3, 4, 6, 12"),
        ("hybrid", 3, "Use all-gather or ring or ulysses"),
        ("hybrid", 5, "Use all-gather or ring, or another number of ranks"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(method, degree, message):
    with pytest.raises(UserError, match=message):
        choose_method(method, Sizes(degree, 12, 12, 64))


@pytest.mark.parametrize(
    ("degree", "near", "heads_degree"),
    # 8 ranks that are on one machine, or on 8, are 4 x 2.
    [(4, 2, 2), (8, 4, 4), (8, 2, 2), (8, 8, 4), (8, 1, 4)],
)
def test_hybrid_divides_heads_within_a_machine(degree, near, heads_degree):
    choice = choose_method("hybrid", Sizes(degree, 12, 12, 64, near=near))
    assert (choice.heads_degree, choice.method) == (heads_degree, "hybrid")
    assert (
        choice.why
        == f"requested, 12 heads over {heads_degree} ranks x rings of {degree // heads_degree}"
    )


def test_traffic_is_what_is_sent():
    sizes = Sizes(degree=4, heads=8, kv_heads=2, head_dim=16, held=100, bytes_each=2)
    one = 100 * 16 * 2  # a head of the tokens held
    # Three of the four quarters of q, out, and of keys and values repeated to
    # four heads leave a rank.
    assert traffic(sizes, 4, gathers=False).forward == 3 / 4 * (8 + 8 + 4 + 4) * one
    assert traffic(sizes, 1, gathers=False).forward == 3 * 2 * 2 * one
    assert traffic(sizes, 1, gathers=True).forward == 3 * 2 * 2 * one
    # Gradients of other ranks' keys and values are float32.
    assert traffic(sizes, 1, gathers=False, share=0.25).forward == 3 / 4 * 2 * 2 * one
    assert traffic(sizes, 1, gathers=False).backward == (3 * 2 * 2 + 3 * 2 * 2 * 2) * one
    assert traffic(sizes, 1, gathers=True).backward == (3 * 2 * 2 + 3 * 2 * 2 * 2) * one
