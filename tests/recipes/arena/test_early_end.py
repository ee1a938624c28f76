"""Stages that end as soon as they have learned enough: what is reported of them, and that
resuming knows of their end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_classifier_runs import SignalAt, curve, same_weights, summary, weights
from tiny_runs import TinyRuns

from flashtrain import registry

pytestmark = pytest.mark.integration  # whole runs

# Half of the held-out images are right from the start: a growing stage ends at its first
# validation, after 3 steps.
STAGES = (
    "curriculum.stages=[{side:24,contour:2..3,steps:9,batch:4,stop_at_accuracy:0.1,"
    "schedule:constant},{side:28,steps:4,batch:4}]"
)


@pytest.fixture(scope="module")
def early(curriculum: TinyRuns) -> Path:
    """The folder of a finished curriculum whose first two stages ended early."""
    status, folder = curriculum.run("early", STAGES)
    assert status == 0
    return folder


def test_the_curve_and_the_summary_report_the_steps_really_made(early) -> None:
    rows = [(row["stage"], str(row["contour"]), row["step"], row["images"]) for row in curve(early)]
    assert rows == [(1, "2", 3, 12), (2, "3", 3, 24), (3, "easy", 3, 36), (3, "easy", 4, 40)]
    assert (summary(early)["stages"], summary(early)["steps"], summary(early)["samples"]) == (
        3,
        10,
        40,
    )


# A signal is acted upon at the end of the next step. After 2: before the validation that ends the
# first stage. After 6: in the last one of the second stage.
@pytest.mark.parametrize("step", [2, 6])
def test_a_run_stopped_at_any_place_goes_on_as_if_it_had_not_been(
    curriculum: TinyRuns, early, monkeypatch, step
) -> None:
    stop = SignalAt(step)
    monkeypatch.setitem(registry._components["callback"], "stop", lambda _: stop)
    name = f"early-stopped-{step}"
    status, folder = curriculum.run(name, STAGES, "trainer.callbacks=[stop]")
    assert status == 143
    status, folder = curriculum.run(name, STAGES, "resume=auto")
    assert status == 0
    assert same_weights(folder, early)
    assert curve(folder) == curve(early)
    assert summary(folder)["samples"] == 40


def test_a_last_stage_that_ended_early_has_ended_for_a_later_command_too(
    curriculum: TinyRuns,
) -> None:
    stages = "curriculum.stages=[{side:24,steps:9,batch:4,stop_at_accuracy:0.1}]"
    _, folder = curriculum.run("ended", stages)
    before = weights(folder), summary(folder)
    status, folder = curriculum.run("ended", stages, f"resume={folder}")
    assert (status, summary(folder)) == (0, before[1])
    assert (summary(folder)["steps"], [row["step"] for row in curve(folder)]) == (3, [3])
    assert all(torch.equal(value, before[0][name]) for name, value in weights(folder).items())
