"""Three gloo ranks share out masked samples: as costly for each, none twice, and as one process would train."""

from __future__ import annotations

import numpy as np
import pytest
from distributed_ranks import of_ranks
from masked_ranks import COST, RANKS, fit


@pytest.fixture(scope="module")
def ranks(three_masked_ranks) -> list[list[dict]]:
    """What each rank wrote of both parts."""
    return of_ranks(three_masked_ranks, RANKS)


@pytest.fixture
def begun(ranks) -> list[dict]:
    """The first two steps of each rank."""
    return [parts[0] for parts in ranks]


@pytest.fixture
def resumed(ranks) -> list[dict]:
    """The next two."""
    return [parts[1] for parts in ranks]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    """The same steps in one process, a rank's row a micro-batch."""
    return fit(tmp_path_factory.mktemp("alone"), steps=4, resume=None, devices=1, accumulate=RANKS)


def test_every_step_costs_each_rank_the_same(begun):
    costs = np.array([[COST.of(np.array(row)).sum() for row in rank["lengths"]] for rank in begun])
    assert costs.shape == (RANKS, 2)
    assert (costs.max(0) / costs.mean(0)).max() < 1.05
    fill = np.mean([sum(row) for rank in begun for row in rank["lengths"]]) / 2048
    assert fill > 0.97  # tiny rows: a fifth of the tail's longest sequence is half a percent


def test_no_sample_is_read_twice_and_all_ranks_stand_at_one_place(begun):
    numbers = [number for rank in begun for row in rank["rows"] for number in row]
    assert len(set(numbers)) == len(numbers)
    states = [rank["state"] for rank in begun]
    assert states[0] == states[1] == states[2]
    assert states[0]["next_number"] - len(states[0]["waiting"]) == len(numbers)


def test_the_ranks_train_as_one_process_that_reads_all_their_rows(begun, alone):
    together = [row for step in zip(*(rank["rows"] for rank in begun), strict=True) for row in step]
    assert together == [list(row) for row in alone["rows"][: 2 * RANKS]]
    for rank in begun:
        assert rank["losses"] == pytest.approx(alone["losses"][:2], rel=1e-5)


def test_resumed_ranks_go_on_exactly(resumed, alone):
    together = [row for step in zip(*(rank["rows"] for rank in resumed), strict=True) for row in step]
    assert together == [list(row) for row in alone["rows"][2 * RANKS :]]
    for rank in resumed:
        assert rank["losses"] == pytest.approx(alone["losses"][2:], rel=1e-5)
        assert rank["accuracy"] == pytest.approx(alone["accuracy"], abs=2e-3)
