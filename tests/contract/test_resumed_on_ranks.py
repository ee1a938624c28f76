"""Two ranks: a resumed run equals an uninterrupted one, bit for bit; one process resumes
it (docs/train/runs.md)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from contract_runs import (
    SHARDS,
    Settings,
    assert_same_run,
    language,
    logged,
    masked_language,
    streamed,
    summary,
)
from forked_commands import run

pytestmark = pytest.mark.integration  # whole runs, in processes

DDP = {"trainer.strategy": "ddp"}
CASES: dict[str, tuple[Callable[[Path], Settings], Settings]] = {
    "file": (language, DDP),
    "sharded file": (language, {"trainer.strategy": "fsdp"}),
    "folder": (language, SHARDS),
    "masked": (masked_language, DDP),
    "streamed": (streamed, DDP),
}
STOP = {"trainer.max_minutes": 1e-6}  # after its first step


@pytest.fixture(scope="module")
def on_two(request, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    place = tmp_path_factory.mktemp("text")
    make, kind = CASES[request.param]
    shared = {"data.cache_dir": place, "trainer.devices": 2, "trainer.checkpoint_format": "file"}
    rows = {} if make is masked_language else {"trainer.micro_batch": 2}
    return {**make(place), **shared, **rows, **kind}


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., Path]:
    def start(settings: Settings, name: str, *, resume: bool = False) -> Path:
        folder = tmp_path / name
        where = "resume" if resume else "hydra.run.dir"
        run({**settings, where: folder}, tmp_path / f"printed-{name}", settings["trainer.devices"])
        return folder

    return start


@pytest.mark.parametrize("on_two", CASES, indirect=True)
def test_two_ranks_go_on_from_two(on_two: Settings, command) -> None:
    stopped = command({**on_two, **STOP}, "stopped")
    assert summary(stopped)["status"] == "stopped"
    assert_same_run(command(on_two, "stopped", resume=True), command(on_two, "whole"))


@pytest.mark.parametrize("on_two", [case for case in CASES if case != "streamed"], indirect=True)
def test_one_process_goes_on_from_two_with_the_losses_of_one(on_two: Settings, command) -> None:
    """Sums over ranks are in another order: equal but for rounding. Each rank draws its
    own dropout, so without."""
    on_two = {**on_two, **{name: 0 for name in on_two if name.endswith(".dropout")}}
    alone = {
        **on_two,
        "trainer.devices": 1,
        "trainer.strategy": "auto",
        "trainer.checkpoint_format": "auto",
    }
    command({**on_two, **STOP}, "begun")
    resumed, whole = command(alone, "begun", resume=True), command(alone, "alone")
    mine, theirs = logged(resumed), logged(whole)
    assert mine.keys() == theirs.keys()
    for place, values in mine.items():
        assert values == pytest.approx(theirs[place], rel=1e-3), place
    assert summary(resumed)["validation_loss"] == pytest.approx(
        summary(whole)["validation_loss"], rel=1e-4
    )
