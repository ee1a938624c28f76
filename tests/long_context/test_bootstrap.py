"""Intervals by drawing whole documents."""

from __future__ import annotations

import numpy as np
import pytest

from flashtrain_recipes.long_context.compare import draws, mean_interval, per_unit


def interval(losses, units, resamples=4000):
    sums, counts = per_unit(np.asarray(losses, dtype=float), np.asarray(units))
    return mean_interval(sums, counts, draws(len(sums), resamples, seed=1))


def test_the_value_is_the_mean_over_all_tokens_whatever_the_documents() -> None:
    assert interval([[1.0, 2.0], [3.0, 4.0], [8.0, 9.0]], [7, 7, 9]).value == 4.5


def test_windows_are_summed_by_their_document() -> None:
    sums, counts = per_unit(np.array([[1.0, 2.0], [3.0, 4.0], [8.0, 9.0]]), np.array([9, 7, 9]))
    assert (sums.tolist(), counts.tolist()) == ([7.0, 20.0], [2, 4])


def test_the_interval_is_that_of_the_normal_theory_where_there_are_many_documents() -> None:
    losses = np.random.RandomState(0).normal(3.0, 0.5, size=(400, 1))
    found = interval(losses, np.arange(400))
    half = 1.96 * losses.std() / 20
    assert found.low == pytest.approx(found.value - half, abs=0.01)
    assert found.high == pytest.approx(found.value + half, abs=0.01)


def test_windows_of_one_document_do_not_make_the_interval_narrower() -> None:
    documents = np.random.RandomState(0).normal(3.0, 0.5, size=(10, 1))
    alone = interval(documents, np.arange(10))
    repeated = interval(np.repeat(documents, 20, axis=0), np.repeat(np.arange(10), 20))
    assert (repeated.low, repeated.high) == pytest.approx((alone.low, alone.high))
    as_windows = interval(np.repeat(documents, 20, axis=0), np.arange(200))
    assert as_windows.high - as_windows.low < 0.5 * (alone.high - alone.low)


def test_equal_documents_have_no_spread() -> None:
    assert tuple(interval(np.full((5, 3), 2.0), np.arange(5))) == (2.0, 2.0, 2.0)


def test_a_single_unit_has_no_interval() -> None:
    assert tuple(interval([[1.0, 3.0]], [0])) == (2.0, None, None)


def test_draws_are_the_same_for_the_same_seed() -> None:
    assert np.array_equal(draws(7, 5, seed=3), draws(7, 5, seed=3))
    assert not np.array_equal(draws(7, 5, seed=3), draws(7, 5, seed=4))
