"""Sequences shared out among rows: none too full, each as costly, and what waits longest first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtrain.data.balance import Cost, evenness, share_out
from flashtrain.errors import UserError

LARGE = Cost(per_token=72 * 24 * 1024**2, per_pair=12 * 24 * 1024)  # BERT-large: BertConfig says why


def heavy_tailed(count: int, longest: int, seed: int = 0) -> np.ndarray:
    """Pareto lengths (index 1.2), so that a few sequences hold much of the text."""
    random = np.random.default_rng(seed)
    return np.clip(16 * (1 + random.pareto(1.2, count)), 3, longest).astype(np.int64)


def log_normal(count: int, longest: int = 512, seed: int = 0) -> np.ndarray:
    """About the paragraphs of English novels in BPE tokens: 5% below 18, half below 52, 5% above 206."""
    random = np.random.default_rng(seed)
    return np.clip(random.lognormal(np.log(58), 0.8, count), 18, longest).astype(np.int64)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60),
    bins=st.integers(1, 4),
    budget=st.integers(20, 64),
    most=st.integers(1, 12),
    per_pair=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_no_row_holds_too_much_no_sequence_comes_twice_and_the_oldest_always(lengths, bins, budget, most, per_pair):
    rows = share_out(lengths, Cost(1.0, per_pair), bins=bins, budget=budget, most=most)
    used = [member for row in rows for member in row.members]
    assert len(rows) == bins
    assert len(set(used)) == len(used)
    assert 0 in used
    for row in rows:
        sizes = [lengths[member] for member in row.members]
        assert row.tokens == sum(sizes) <= budget
        assert len(sizes) <= most
        assert row.cost == pytest.approx(Cost(1.0, per_pair).of(np.array(sizes)).sum() if sizes else 0)


@pytest.mark.parametrize("bins", [1, 2, 8, 32])
@pytest.mark.parametrize("budget", [4096, 16384])
def test_rows_of_paragraphs_are_full_and_even(bins, budget):
    lengths = log_normal(2 * bins * budget // 70)
    fill, imbalance = evenness(share_out(lengths, LARGE, bins=bins, budget=budget), budget)
    assert fill > 0.995  # what is left of a row is less than the shortest sequence
    assert imbalance < 1.005


@pytest.mark.parametrize("bins", [2, 8, 16])
@pytest.mark.parametrize("longest", [512, 2048, 4096])
def test_a_heavy_tail_is_evened_out_by_cost_where_equal_tokens_would_not_do(bins, longest):
    lengths = heavy_tailed(bins * 2000, longest)
    rows = share_out(lengths, LARGE, bins=bins, budget=32768)
    fill, imbalance = evenness(rows, 32768)
    assert fill > 0.99
    assert imbalance < 1.05


def test_what_one_sequence_costs_more_than_a_row_cannot_be_evened():
    rows = share_out([4096, *[16] * 400], Cost(1.0, 1 / 256), bins=4, budget=4096)
    assert evenness(rows, 4096).imbalance > 2


def test_a_sequence_longer_than_a_row_is_one_line():
    with pytest.raises(UserError, match="a sequence of 65 tokens for rows of 64"):
        share_out([3, 65], Cost(), bins=1, budget=64)
