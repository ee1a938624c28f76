"""What sharing attention takes of a rank's memory, by way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtrain.distributed.context.ways import AUTO, MASK_BYTES, WAYS, choose_way, exchange_bytes


def needed(way: str, held: int, degree: int, heads: int = 16, kv_heads: int = 4, head_dim: int = 64) -> int:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    choice = choose_way(way, degree=degree, held=held, **shape)
    return exchange_bytes(choice, held=held, degree=degree, **shape)


def test_one_rank_exchanges_nothing():
    assert needed(AUTO, 1024, 1) == 0


@pytest.mark.parametrize("way", WAYS)
def test_it_is_proportional_to_the_tokens_held(way):
    heads = 12 if way == "hybrid" else 16
    assert needed(way, 4096, 8, heads) == 4 * needed(way, 1024, 8, heads)


@given(held=st.integers(1, 2**20), degree=st.sampled_from([2, 4, 8, 16]))
def test_a_ring_needs_as_much_on_any_number_of_ranks_and_gathering_more_on_more(held, degree):
    masks = MASK_BYTES * held * degree
    assert needed("ring", held, 2 * degree) - 2 * masks == needed("ring", held, degree) - masks
    assert needed("all-gather", held, 2 * degree) > 1.5 * needed("all-gather", held, degree)


def test_a_ring_of_full_heads_in_numbers():
    """n H D = 8 M numbers: q, k and v of 16 heads of 64 for 8192 tokens; keys and values twice that."""
    number = 8192 * 16 * 64
    expected = 4 * 2 * number * 2 + 3 * 2 * number * 4 + number * 4  # bf16; float32 gradients under way; dQ
    assert needed("ring", 8192, 4, kv_heads=16) == expected + MASK_BYTES * 4 * 8192
