"""The plan of a run's rows: every sample once an epoch, full rows."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtrain.data.balance import Cost
from flashtrain.data.token_budget import TokenBudgetPlan, rows_once
from flashtrain.data.token_budget_sampler import STATES_SAVED, TokenBudgetSampler

# BERT-large: BertConfig says why.
LARGE = Cost(per_token=72 * 24 * 1024**2, per_pair=12 * 24 * 1024)


def heavy_tailed(count: int, longest: int, seed: int = 0) -> np.ndarray:
    """Pareto lengths (index 1.2), so that a few sequences hold much of the text."""
    random = np.random.default_rng(seed)
    return np.clip(16 * (1 + random.pareto(1.2, count)), 3, longest).astype(np.int64)


def log_normal(count: int, longest: int = 512, seed: int = 0) -> np.ndarray:
    """About the paragraphs of English novels in BPE tokens: 5% below 18, half
    below 52, 5% above 206."""
    random = np.random.default_rng(seed)
    return np.clip(random.lognormal(np.log(58), 0.8, count), 18, longest).astype(np.int64)


def plan_of(lengths: np.ndarray, **options) -> TokenBudgetPlan:
    return TokenBudgetPlan(lengths, **{"budget": 4096, "rows": 4, "cost": LARGE, **options})


def samples_of(plan: TokenBudgetPlan, steps: int) -> list[int]:
    return [number for _ in range(steps) for row in plan.next_step() for number in row]


def evenness(plan: TokenBudgetPlan, lengths: np.ndarray, steps: int) -> tuple[float, float]:
    """The share of the budget that these steps use, and the costliest row of
    one over its mean row."""
    rows = [
        [lengths[np.array(row) % len(lengths)] for row in plan.next_step()] for _ in range(steps)
    ]
    tokens = np.array([[row.sum() for row in step] for step in rows])
    costs = np.array([[LARGE.of(row).sum() for row in step] for step in rows])
    return tokens.mean() / plan.budget, (costs.max(1) / costs.mean(1)).max()


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=80),
    rows=st.integers(1, 4),
    most=st.sampled_from([None, 3]),
    seed=st.integers(0, 3),
)
def test_every_sample_is_used_once_an_epoch(lengths, rows, most, seed):
    plan = plan_of(np.array(lengths), budget=40, rows=rows, max_sequences=most, seed=seed)
    used: list[int] = []
    while plan.state.next_number - len(plan.state.waiting) < 3 * len(lengths) or min(
        plan.state.waiting, default=plan.state.next_number
    ) < 2 * len(lengths):
        step = plan.next_step()
        used += [number for row in step for number in row]
        assert len(step) == rows
        assert max(sum(lengths[number % len(lengths)] for number in row) for row in step) <= 40
        assert max(map(len, step)) <= (most or 40)
    counts = np.bincount(used)
    assert counts.max() == 1
    assert (counts[: 2 * len(lengths)] == 1).all()
    assert plan.state.used == len(used)


def test_epochs_come_in_orders_of_their_own_and_those_follow_the_seed():
    lengths = log_normal(500)
    first, second = samples_of(plan_of(lengths), 8), samples_of(plan_of(lengths, seed=1), 8)
    assert first == samples_of(plan_of(lengths), 8)
    assert first != second


@pytest.mark.parametrize(
    ("lengths", "budget", "rows", "steps", "uneven"),
    [(log_normal(3000), 4096, 2, 37, 1.02), (log_normal(3000), 4096, 8, 9, 1.02),
     (heavy_tailed(20000, 2048), 32768, 4, 12, 1.05)],
)  # fmt: skip
def test_rows_stay_full_and_even_also_into_the_next_epoch(lengths, budget, rows, steps, uneven):
    fill, imbalance = evenness(plan_of(lengths, budget=budget, rows=rows), lengths, steps)
    assert fill > 0.99
    assert imbalance < uneven


def test_a_run_may_go_on_with_other_rows_and_still_use_every_sample_once():
    lengths = log_normal(900)
    first = plan_of(lengths, rows=2)
    used = samples_of(first, 4)
    then = plan_of(lengths, rows=6, budget=2048)
    then.state = first.state
    while min(then.state.waiting, default=then.state.next_number) < 900:
        used += samples_of(then, 1)
    assert np.bincount(used)[:900].tolist() == [1] * 900


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_evaluation_reads_every_sample_once_and_as_many_rows_on_every_rank(ranks):
    lengths = log_normal(200)
    batches = rows_once(lengths, budget=1024, ranks=ranks)
    assert {len(batch) for batch in batches} == {ranks}
    rows = [row for batch in batches for row in batch]
    assert sorted(number for row in rows for number in row) == list(range(200))
    assert all(lengths[list(row)].sum() <= 1024 for row in rows)


def test_any_earlier_step_can_be_planned_again_however_many_were_planned_since():
    samples = SimpleNamespace(lengths=log_normal(50), micro_batches=lambda rows, **_: [rows])
    options = {"batch_size": 4, "accumulate": 1, "total_steps": 2 * STATES_SAVED}
    Sampled = type("Sampled", (SimpleNamespace,), {"__len__": lambda self: len(self.lengths)})
    samples = Sampled(**vars(samples))
    sampler = TokenBudgetSampler(samples, {"budget": 1024, "cost": LARGE}, **options)
    expected = [sampler.place(step) for step in (0, 3)]
    assert len(list(islice(sampler, STATES_SAVED + 44))) == STATES_SAVED + 44
    assert [sampler.place(step) for step in (0, 3)] == expected
