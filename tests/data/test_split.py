"""Which documents are held out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtrain.data.packing import Split, split_documents
from flashtrain.errors import UserError


def split(lengths, **options) -> Split:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return split_documents(offsets, **{"fraction": 0.01, "context": 64, **options})


def spans(part):
    return set(zip(part.begins.tolist(), part.ends.tolist(), strict=True))


def test_about_the_fraction_of_the_documents_is_held_out_in_the_same_draw_every_time():
    one, other = split([100] * 1000, fraction=0.05), split([100] * 1000, fraction=0.05)
    assert (len(one.training.begins), len(one.validation.begins)) == (950, 50)
    assert spans(one.validation) == spans(other.validation)


def test_a_document_that_is_most_of_the_corpus_is_trained_on():
    for lengths in ([100_000, 500, 500], [500, 100_000, 500], [500, 500, 100_000]):
        assert split(lengths).validation.tokens == 500


def test_among_few_long_documents_the_shortest_sufficient_one_is_held_out():
    assert spans(split([1000, 700, 900, 20]).validation) == {(1000, 1700)}


def test_the_tail_is_cut_from_the_longest_document_with_a_line_and_the_rest_stays(caplog):
    found = split([30, 10_000, 40], fraction=0.05, context=100)
    assert spans(found.training) == {(0, 30), (30, 10_030 - 504), (10_030, 10_070)}
    assert spans(found.validation) == {(10_030 - 504, 10_030)}
    assert "last 504 tokens of the longest one" in caplog.text


def test_nothing_is_held_out_where_nothing_is_to_spare_with_a_line_or_of_a_fraction_of_zero_without(
    caplog,
):
    assert split([100] * 100, fraction=0.0).validation is None
    assert caplog.text == ""
    found = split([100], fraction=0.05)
    assert (found.validation, found.training.tokens) == (None, 100)
    assert "too small to hold out some for validation" in caplog.text


def test_a_corpus_shorter_than_a_sample_is_reported_with_the_numbers():
    with pytest.raises(
        UserError, match=r"50 tokens, fewer than the 65 .*context=64.*at most 49, or more text"
    ):
        split([20, 30])


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=60),
    st.floats(0, 0.99),
    st.integers(1, 100),
)
def test_every_token_is_on_one_side_and_each_side_holds_a_sample(lengths, fraction, context):
    if sum(lengths) < context + 1:
        return
    parts = [
        part for part in split(lengths, fraction=fraction, context=context) if part is not None
    ]
    covered = np.concatenate(
        [np.arange(b, e) for part in parts for b, e in zip(*part, strict=True)]
    )
    assert sorted(covered.tolist()) == list(range(sum(lengths)))
    assert all(part.tokens >= context + 1 for part in parts)
    assert all((part.begins < part.ends).all() for part in parts)


@pytest.mark.parametrize("lengths", [(80_000, 20_000), (20_000, 80_000)])
def test_at_least_half_of_what_the_fraction_leaves_is_trained_on(lengths):
    # Of 100,000: 30,000 are to stay.
    assert split(list(lengths), fraction=0.4).validation.tokens == 20_000
