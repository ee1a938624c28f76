"""Rows of a comparison: perplexities, intervals by drawing whole documents, times, the paper's
values, and whether longer was better.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flashtrain_recipes.long_context.compare import BETTER, EQUAL, UNKNOWN, WORSE, length_rows
from flashtrain_recipes.long_context.evaluate import SLIDING, WHOLE, Scores, Windows
from flashtrain_recipes.long_context.intervals import draws, mean_interval, per_unit
from flashtrain_recipes.long_context.study import lengths_table as table


def interval(losses, units):
    sums, counts = per_unit(np.asarray(losses, dtype=float), np.asarray(units))
    return mean_interval(sums, counts, draws(len(sums), seed=1))


def test_the_value_is_the_mean_over_all_tokens_whatever_the_documents() -> None:
    sums, counts = per_unit(np.array([[1.0, 2.0], [3.0, 4.0], [8.0, 9.0]]), np.array([9, 7, 9]))
    assert (sums.tolist(), counts.tolist()) == ([7.0, 20.0], [2, 4])
    assert interval([[1.0, 2.0], [3.0, 4.0], [8.0, 9.0]], [7, 7, 9]).value == 4.5
    assert tuple(interval([[1.0, 3.0]], [0])) == (2.0, None, None)  # one unit has no interval


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


NOISE = np.random.RandomState(0).normal(0, 0.5, size=(12, 8)).astype("float32")
WINDOWS = Windows(torch.zeros(12, 17, dtype=torch.long), np.repeat(np.arange(6), 2), "documents")


def trained(rate: float, **changes):
    summary = {
        "status": "finished",
        "model": "gpt2-124m",
        "tokens": 1000,
        "tokens_per_second": rate,
        "steps": 10,
    }
    return {**summary, "peak_memory_gib": 1.0, **changes}


def scores(level: float, change: float | np.ndarray = 0.0) -> Scores:
    losses = 3 + NOISE + level + change
    return {WHOLE: losses, SLIDING: losses - 0.1}


def rows_of(**levels):
    found = {int(context[1:]): scores(*np.atleast_1d(level)) for context, level in levels.items()}
    rates = dict.fromkeys(found, 500.0)
    return length_rows({c: trained(rate) for c, rate in rates.items()}, found, WINDOWS, seed=0)


def test_perplexity_is_the_exponential_of_the_mean_loss_with_its_interval() -> None:
    (row,) = rows_of(c1024=0.0)
    assert row["perplexity"] == pytest.approx(math.exp(3 + NOISE.mean()), rel=1e-3)
    assert row["perplexity_low"] < row["perplexity"] < row["perplexity_high"]
    assert row["perplexity_sliding"] == pytest.approx(row["perplexity"] * math.exp(-0.1), rel=1e-3)
    assert (row["scored_tokens"], row["units"], row["unit"]) == (96, 6, "documents")


def test_a_longer_context_is_better_worse_or_neither_by_the_difference_on_the_same_tokens() -> None:
    shaky = np.random.RandomState(1).normal(0, 0.4, size=NOISE.shape).astype("float32")
    found = {
        1024: scores(0.0),
        2048: scores(-0.02),
        4096: scores(0.01),
        8192: scores(0.01, shaky - shaky.mean()),
    }
    rows = length_rows({c: trained(500.0) for c in found}, found, WINDOWS, seed=0)
    assert [row["against_shorter"] for row in rows] == [None, BETTER, WORSE, EQUAL]
    # The intervals of 1024 and 2048 overlap: only the paired difference tells that one is better.
    assert rows[1]["perplexity_high"] > rows[0]["perplexity_low"]


def test_differences_in_loss_are_reported_with_their_intervals() -> None:
    rows = rows_of(c1024=0.0, c2048=-0.02, c4096=0.03)
    assert rows[0]["loss_less_shorter"] is None
    assert rows[0]["loss_less_shortest_sliding_low"] is None
    assert [row["loss_less_shorter"] for row in rows[1:]] == pytest.approx([-0.02, 0.05], abs=1e-4)
    assert [row["loss_less_shortest_sliding"] for row in rows[1:]] == pytest.approx(
        [-0.02, 0.03], abs=1e-4
    )
    # A constant shift has no spread.
    assert rows[2]["loss_less_shorter_low"] == pytest.approx(0.05, abs=1e-4)


def test_one_window_is_too_little_text_to_judge() -> None:
    single = Windows(WINDOWS.tokens[:1], np.array([0]), "windows")
    found = {c: {WHOLE: NOISE[:1] + 3, SLIDING: NOISE[:1] + 3} for c in (1024, 2048)}
    rows = length_rows({c: trained(500.0) for c in found}, found, single, seed=0)
    assert (rows[1]["against_shorter"], rows[1]["perplexity_low"]) == (UNKNOWN, None)


def test_time_is_a_tokens_relative_to_the_shortest_context() -> None:
    found = {1024: scores(0.0), 4096: scores(0.0)}
    rows = length_rows({1024: trained(500.0), 4096: trained(400.0)}, found, WINDOWS, seed=0)
    assert [row["time_ratio"] for row in rows] == [1.0, 1.25]
    assert [row["train_seconds"] for row in rows] == [2.0, 2.5]


def test_the_papers_values_stand_beside_and_are_not_ours() -> None:
    rows = rows_of(c1024=0.0, c2048=0.0, c4096=0.0, c8192=0.0)
    assert [row["paper_perplexity"] for row in rows] == [18.2, 17.6, 17.5, None]
    assert [row["paper_days"] for row in rows] == [2.7, 3.0, 3.6, None]
    assert [row["paper_time_ratio"] for row in rows] == [1.0, 1.111, 1.333, None]
    shown = table(rows)
    assert "Table 4: GPT-2 small on OpenWebText" in shown.title
    assert "paper: perplexity" in shown.headings
    # One context is no comparison.
    assert not any("paper" in heading for heading in table(rows[:1]).headings)


def test_a_length_that_did_not_finish_stays_a_row_that_reports_it() -> None:
    failed = {
        "status": "out of memory",
        "error": "out of memory: 80 GiB",
        "model": "gpt2-124m",
        "tokens": 1000,
    }
    summaries = {1024: trained(500.0), 2048: failed, 4096: trained(400.0)}
    rows = length_rows(summaries, {1024: scores(0.0), 4096: scores(-0.1)}, WINDOWS, seed=0)
    assert (rows[1]["status"], rows[1].get("perplexity")) == ("out of memory", None)
    assert rows[2]["against_shorter"] == BETTER  # than 1,024, the next shorter that was scored
    assert "out of memory" in table(rows).markdown()
