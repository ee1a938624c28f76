"""trainer.epochs gives the number of steps, from the data that a run reads; a run so
given resumes exactly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from contract_runs import TASKS, Ended, Settings, assert_same_run, fail, interrupted, summary, train

import flashtrain
from flashtrain.data.loader import StepSampler
from flashtrain.folders.run_folder import read_settings


def settings_of(case: str, place: Path, epochs: float) -> Settings:
    settings = TASKS[case](place)
    del settings["trainer.steps"]
    return {**settings, "trainer.epochs": epochs}


@pytest.mark.parametrize(("epochs", "steps"), [(1, 13), (2, 25), (0.01, 1), (0.08, 1), (0.1, 2)])
def test_an_epochs_last_step_reads_of_the_next_one(epochs: float, steps: int) -> None:
    assert StepSampler(100, batch_size=4, accumulate=2, total_steps=1).steps_of(epochs) == steps


@pytest.mark.integration
@pytest.mark.parametrize("case", ["language", "chat", "masked_language", "fine_tuning", "mixture"])
def test_the_steps_read_the_data_so_many_times(case: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    settings = settings_of(case, tmp_path / "data", 1.5)
    found = summary(train(settings, tmp_path / "runs"))
    assert 1.5 <= found["epochs"] <= 1.5 * (found["steps"] + 1) / found["steps"]
    (folder,) = (tmp_path / "runs").rglob("config.yaml")
    assert read_settings(folder.parent).trainer.steps == found["steps"]


@pytest.mark.parametrize("case", ["language", "chat"])
def test_a_plan_reads_the_data_and_counts_the_steps_of_its_training(
    case: str, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    settings = {**settings_of(case, tmp_path / "data", 1.5), "hardware.demo": "never"}
    text = flashtrain.plan(**settings)
    counted = re.search(r"^trainer.epochs=1.5: ([\d,]+) steps, counted from", text, re.MULTILINE)
    assert counted is not None
    steps = int(counted[1].replace(",", ""))
    assert f"({steps} steps of" in text
    assert summary(train(settings, tmp_path / "runs"))["steps"] == steps


@pytest.mark.parametrize("case", ["language", "chat"])
def test_a_step_that_reads_the_data_several_times_says_so_and_which_one_to_set(
    case: str, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    settings = {**settings_of(case, tmp_path / "data", 2), "trainer.micro_batch": None}
    settings["trainer.tokens_per_step"] *= 64
    line = next(one for one in flashtrain.plan(**settings).splitlines() if "epochs=2: " in one)
    said = re.fullmatch(
        r"trainer.epochs=2: 1 step, counted from the training data. Steps are whole, so that it is "
        r"read ([\d.]+) times. For ten set trainer.tokens_per_step to about ([\d,]+), and context "
        r"to no more.",
        line,
    )
    assert said is not None
    assert float(said[1]) > 4
    tokens = int(said[2].replace(",", ""))
    settings["context"] = min(settings["context"], tokens)
    settings["trainer.tokens_per_step"] = tokens  # whole rows
    text = flashtrain.plan(**settings)
    counted = re.search(
        r"^trainer.epochs=2: (\d+) steps, counted from the training data$", text, re.M
    )
    assert counted is not None
    assert 9 <= int(counted[1]) <= 20


@pytest.mark.integration
@pytest.mark.parametrize("auto", [False, True])
def test_such_a_run_resumes_exactly(auto: bool, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    settings = settings_of("language", tmp_path / "data", 2)
    folder = interrupted(settings, tmp_path / "stopped", 5, fail, Ended)
    train(settings, tmp_path / "stopped", resume="auto" if auto else folder)
    assert_same_run(
        folder, train({**settings, "trainer.epochs": None, "trainer.steps": 6}, tmp_path / "whole")
    )


@pytest.mark.parametrize(
    ("case", "changed", "line"),
    [
        ("streamed", {}, "trainer.epochs=1 needs text of a known length"),
        ("classification", {}, "trainer.epochs is not supported by task=classification"),
        ("masked_language", {"mode": "plan"}, "trainer.epochs is not supported by mode=plan"),
        ("language", {"trainer.steps": 3}, "trainer.steps and trainer.epochs are both given"),
    ],
)
def test_what_has_no_epochs_is_refused(
    case: str, changed: Settings, line: str, tmp_path: Path
) -> None:
    with pytest.raises(flashtrain.UserError, match=line):
        train({**settings_of(case, tmp_path, 1), **changed}, tmp_path / "runs")
