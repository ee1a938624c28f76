"""A run that was stopped and resumed is the run that was not: weights, optimizer states
and losses, bit for bit.

Every case trains with dropout and, but for one stage, with accumulated gradients; validations and
checkpoints fall before, on and after the steps at which it is stopped.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from contract_runs import (
    ROWS,
    TASKS,
    Ended,
    Settings,
    assert_same_run,
    fail,
    interrupted,
    last_step,
    logged,
    summary,
    train,
)
from transformers import get_linear_schedule_with_warmup

import flashtrain

pytestmark = pytest.mark.integration  # whole runs


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def settings_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Settings]:
    known: dict[str, Settings] = {}

    def get(case: str) -> Settings:
        if case not in known:
            known[case] = TASKS[case](tmp_path_factory.mktemp("data"))
            if "data" in known[case]:
                known[case]["data.cache_dir"] = tmp_path_factory.mktemp("cache")
        return known[case]

    return get


@pytest.fixture(scope="module")
def uninterrupted(settings_of, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    known: dict[str, Path] = {}

    def get(case: str) -> Path:
        if case not in known:
            known[case] = train(settings_of(case), tmp_path_factory.mktemp("whole"))
        return known[case]

    return get


@pytest.fixture
def terminated(monkeypatch):
    """A program that ends by an exception of its own where it is sent SIGTERM."""

    def end(*_) -> None:
        raise Ended

    before = signal.signal(signal.SIGTERM, end)
    yield
    signal.signal(signal.SIGTERM, before)


# The micro-batch in which it is stopped: two make a step, but for the first stage's 5 steps of
# classification. -1, -2: in the first validation, and in the second, which follows the last step.
@pytest.mark.parametrize(
    ("case", "at", "act", "raised"),
    [
        *((case, 5, terminate, Ended) for case in TASKS),
        *(("language", at, terminate, Ended) for at in (4, -1, -2)),
        # in each stage, on the first one's last step.
        *(("classification", at, terminate, Ended) for at in (3, 4, 8)),
        # in the last validation of the first stage, before the second has saved, and in it.
        *(("staged", at, terminate, Ended) for at in (-1, 6, 12)),
        ("staged_adapters", 7, terminate, Ended),
        *(("language", at, ctrl_c, KeyboardInterrupt) for at in (2, 5)),
        *(("language", at, fail, Ended) for at in (6, 7, -1, -2)),
        *((case, 7, fail, Ended) for case in ("sharded", "streamed", "fine_tuning")),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_stopped_in_any_step(
    case, at, act, raised, settings_of, uninterrupted, terminated, tmp_path: Path
) -> None:
    settings = settings_of(case)
    folder = interrupted(settings, tmp_path, at, act, raised)
    assert summary(folder)["status"] in ("stopped", "failed")
    if case == "language":  # on one device also an error leaves the last whole step
        assert last_step(folder) == {-1: 3, -2: 6}.get(at, at // 2 + (act is not fail))
    assert train(settings, tmp_path, resume=folder) == folder
    assert_same_run(folder, uninterrupted(case))


@pytest.mark.parametrize("case", ["language", "sharded", "chat"])
def test_a_checkpoint_of_an_epochs_last_batch(case: str, settings_of, tmp_path: Path) -> None:
    """A shorter run has ended, by Lightning's count an epoch; of the text three steps
    are an epoch of its rows."""
    settings = {**settings_of(case), "schedule": "constant"}
    folder = train(settings, tmp_path / "resumed", **{"trainer.steps": 3})
    if case != "chat":
        assert ROWS == 3 * 8
        assert summary(folder)["epochs"] == 1
    assert train(settings, tmp_path / "resumed", resume=folder) == folder
    assert_same_run(folder, train(settings, tmp_path / "whole"))


@pytest.mark.parametrize("states", ["full", "host"])
def test_beyond_its_end_a_run_has_the_rates_of_its_new_length(
    states: str, settings_of, tmp_path: Path
) -> None:
    settings = {**settings_of("language"), "schedule": "linear", "optimizer.states": states}
    settings["schedule.minimum_ratio"] = 0
    folder = train(settings, tmp_path)
    assert train(settings, tmp_path, resume=folder, **{"trainer.steps": 12}) == folder
    factor = get_linear_schedule_with_warmup(torch.optim.SGD([torch.zeros(1)]), 1, 13).lr_lambdas[0]
    rates = [
        next(value for name, value in row.items() if name.startswith("lr-"))
        for row in logged(folder).values()
    ]
    # Ours leaves the first rate out, which is 0.
    assert rates[6:] == pytest.approx([0.003 * factor(step + 1) for step in range(6, 12)])
    assert min(rates) > 0


def test_the_best_weights_are_not_resumed(settings_of, uninterrupted, tmp_path: Path) -> None:
    best = uninterrupted("language") / "checkpoints" / "best.ckpt"
    with pytest.raises(flashtrain.UserError, match="no state of the optimizer"):
        train(settings_of("language"), tmp_path, resume=best, **{"trainer.steps": 12})


@pytest.mark.gpu
def test_dropout_on_a_gpu(tmp_path: Path) -> None:
    """Sums on a GPU may be in another order; other dropout would change a loss by a percent."""
    settings = {
        **TASKS["language"](tmp_path),
        "data.cache_dir": tmp_path,
        "hardware": "gpu",
        "model.dropout": 0.3,
    }
    settings["trainer.compile"] = False
    folder = interrupted(settings, tmp_path / "resumed", 8, fail, Ended)
    train(settings, tmp_path / "resumed", resume=folder)
    mine, theirs = (
        [row["train_loss"] for row in logged(run).values()]
        for run in (folder, train(settings, tmp_path / "whole"))
    )
    assert mine == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("case", ["language", "sharded"])
def test_a_run_goes_on_from_any_of_the_earlier_checkpoints_that_stay(
    settings_of, uninterrupted, case: str, tmp_path
) -> None:
    folder = train(settings_of(case), tmp_path, **{"trainer.keep_checkpoints": 2})
    places = {path.stem: path for path in (folder / "checkpoints").iterdir()}
    assert sorted(places) == ["best", "last", "step-2", "step-4"]
    assert [flashtrain.load(places[f"step-{n}"], hardware="cpu").step for n in (2, 4)] == [2, 4]
    assert train(settings_of(case), tmp_path, resume=places["step-2"]) == folder
    assert_same_run(folder, uninterrupted(case))


def test_stages_keep_earlier_checkpoints_of_their_own_steps(settings_of, tmp_path) -> None:
    folder = train(settings_of("staged"), tmp_path, **{"trainer.keep_checkpoints": 9})
    names = sorted(path.stem for path in (folder / "checkpoints").glob("*step-*"))
    assert names == ["stage-1-context-32-step-2", "stage-2-context-64-step-2"]
    loaded = flashtrain.load(folder / "checkpoints" / f"{names[1]}.ckpt", hardware="cpu")
    assert (loaded.step, loaded.settings.context) == (2, 64)
