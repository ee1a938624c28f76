"""Two ranks: what they resume equals what was not stopped, bit for bit; one process goes on as docs/runs.md says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from contract_runs import SHARDS, Settings, assert_same_run, language, logged, streamed, summary
from forked_commands import run

pytestmark = pytest.mark.integration  # whole runs, in processes

KINDS = {"file": {"trainer.strategy": "ddp"}, "sharded file": {"trainer.strategy": "fsdp"}, "folder": SHARDS}
STREAMED = "streamed"
STREAMED = {**KINDS["file"], "data.streaming": True}
STOP = {"trainer.max_minutes": 1e-6}  # after its first step


@pytest.fixture(scope="module")
def on_two(request, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    place = tmp_path_factory.mktemp("text")
    text = streamed(place) if request.param == STREAMED else language(place)
    settings = {**text, **KINDS.get(request.param, KINDS["file"]), "data.cache_dir": place, "trainer.micro_batch": 2}
    return {**settings, "trainer.devices": 2, "trainer.checkpoint": "sharded" if request.param == "folder" else "file"}


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., Path]:
    def start(settings: Settings, name: str, *, resume: bool = False) -> Path:
        folder = tmp_path / name
        where = "resume" if resume else "hydra.run.dir"
        run({**settings, where: folder}, tmp_path / f"printed-{name}", settings["trainer.devices"])
        return folder

    return start


@pytest.mark.parametrize("on_two", [*KINDS, STREAMED], indirect=True)
def test_two_ranks_go_on_from_two(on_two: Settings, command) -> None:
    stopped = command({**on_two, **STOP}, "stopped")
    assert summary(stopped)["status"] == "stopped"
    assert_same_run(command(on_two, "stopped", resume=True), command(on_two, "whole"))


@pytest.mark.parametrize("on_two", KINDS, indirect=True)
def test_one_process_goes_on_from_two_with_the_losses_of_one(on_two: Settings, command) -> None:
    """Sums over ranks are in another order: equal but for rounding. Each rank draws its own dropout, so without."""
    on_two = {**on_two, "model.dropout": 0}
    alone = {**on_two, "trainer.devices": 1, "trainer.strategy": "auto", "trainer.checkpoint": "auto"}
    command({**on_two, **STOP}, "begun")
    resumed, whole = command(alone, "begun", resume=True), command(alone, "alone")
    mine, theirs = logged(resumed), logged(whole)
    assert mine.keys() == theirs.keys()
    for place, values in mine.items():
        assert values == pytest.approx(theirs[place], rel=1e-3), place
    assert summary(resumed)["validation_loss"] == pytest.approx(summary(whole)["validation_loss"], rel=1e-4)
