"""Which documents are held out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtrain.data.packing import split_documents
from flashtrain.errors import UserError


def offsets(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def spans(part):
    return set(zip(part.begins.tolist(), part.ends.tolist(), strict=True))


def test_about_the_fraction_of_the_documents_is_held_out():
    split = split_documents(offsets([100] * 1000), fraction=0.05, context=64)
    assert len(split.validation.begins) == 50
    assert len(split.training.begins) == 950


def test_the_draw_is_the_same_every_time_and_another_with_another_seed():
    draws = [
        spans(split_documents(offsets([100] * 1000), fraction=0.05, context=64, seed=seed).validation)
        for seed in (0, 0, 1)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_more_documents_are_held_out_when_they_are_short():
    split = split_documents(offsets([10] * 1000), fraction=0.001, context=64)
    assert 65 <= split.validation.tokens <= 80


def test_a_document_that_is_most_of_the_corpus_is_trained_on():
    for seed in range(10):
        split = split_documents(offsets([100_000, 500, 500]), fraction=0.01, context=64, seed=seed)
        assert split.validation.tokens == 500


def test_among_few_long_documents_the_shortest_sufficient_one_is_held_out():
    split = split_documents(offsets([1000, 700, 900, 20]), fraction=0.01, context=64)
    assert spans(split.validation) == {(1000, 1700)}


def test_the_tail_is_cut_from_the_longest_document_with_a_line_and_the_rest_stays(caplog):
    split = split_documents(offsets([30, 10_000, 40]), fraction=0.05, context=100)
    assert spans(split.training) == {(0, 30), (30, 10_030 - 504), (10_030, 10_070)}
    assert spans(split.validation) == {(10_030 - 504, 10_030)}
    assert "last 504 tokens of one" in caplog.text


def test_a_corpus_with_nothing_to_spare_is_trained_on_whole_with_a_line(caplog):
    split = split_documents(offsets([100]), fraction=0.05, context=64)
    assert split.validation is None
    assert split.training.tokens == 100
    assert "none to spare for validation" in caplog.text


def test_a_fraction_of_zero_holds_out_nothing_without_a_word(caplog):
    split = split_documents(offsets([100] * 100), fraction=0.0, context=64)
    assert split.validation is None
    assert caplog.text == ""


def test_a_corpus_shorter_than_a_sample_is_told_with_the_numbers():
    with pytest.raises(UserError, match=r"50 tokens, fewer than the 65 .*context=64.*at most 49, or more text"):
        split_documents(offsets([20, 30]), fraction=0.01, context=64)


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=60),
    st.floats(0, 0.99),
    st.integers(1, 100),
    st.integers(0, 5),
)
def test_every_token_is_on_one_side_and_each_side_holds_a_sample(lengths, fraction, context, seed):
    if sum(lengths) < context + 1:
        return
    split = split_documents(offsets(lengths), fraction=fraction, context=context, seed=seed)
    parts = [part for part in split if part is not None]
    covered = np.concatenate([np.arange(b, e) for part in parts for b, e in zip(*part, strict=True)])
    assert sorted(covered.tolist()) == list(range(sum(lengths)))
    assert all(part.tokens >= context + 1 for part in parts)
    assert all((part.begins < part.ends).all() for part in parts)
    shared = spans(parts[0]) & spans(parts[-1]) if len(parts) == 2 else set()
    assert not shared
