"""Documents that are planned over ranks: losses and gradients are those of one process and of the
fixed degree, and a training goes on exactly (planned_ranks.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import of_ranks

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def four(planned_ranks: Path) -> list[Any]:
    return of_ranks(planned_ranks / "four", 4)


@pytest.mark.parametrize(("name", "ranks"), [("four", 4), ("eight", 8)])
def test_losses_and_gradients_are_those_of_one_process(
    planned_ranks: Path, name: str, ranks: int
) -> None:
    for found in of_ranks(planned_ranks / name, ranks):
        assert {case: error for case, error in found["errors"].items() if error > 1e-10} == {}


def test_some_documents_are_divided_and_some_are_whole(planned_ranks: Path) -> None:
    shared = {4: [1, 1, 2, 2], 8: [1, 1, 2, 2, 4, 4, 4, 4]}
    for name, ranks in (("four", 4), ("eight", 8)):
        found = [one["shared"] for one in of_ranks(planned_ranks / name, ranks)]
        assert sorted(found) == shared[ranks]


@pytest.mark.parametrize("degree", [2, 4])
def test_a_training_logs_what_the_fixed_degree_logs(four: list[Any], degree: int) -> None:
    logged = four[0]["logged"]
    for step, expected in zip(logged[f"planned {degree}"], logged["fixed 2"], strict=True):
        assert step == pytest.approx(expected, rel=1e-10)


def test_a_resumed_training_logs_what_an_uninterrupted_one_does(four: list[Any]) -> None:
    assert four[0]["resumed"] == four[0]["logged"]["planned 4"][2:]
