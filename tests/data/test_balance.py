"""Sequences shared out among rows: none too full, each as costly, and what waits longest first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtrain.data.balance import Cost, share_out
from flashtrain.errors import UserError


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


def test_what_one_sequence_costs_more_than_a_row_cannot_be_evened():
    rows = share_out([4096, *[16] * 400], Cost(1.0, 1 / 256), bins=4, budget=4096)
    assert max(row.cost for row in rows) > 2 * np.mean([row.cost for row in rows])


def test_a_sequence_longer_than_a_row_is_one_line():
    with pytest.raises(UserError, match=r"a sequence has 65 tokens.* 64"):
        share_out([3, 65], Cost(), bins=1, budget=64)
