"""A run's folder from elsewhere, whose checkpoint or links name other paths: nothing outside
is deleted or written."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_runs import SHARDS, TASKS, Ended, Settings, fail, interrupted, summary, train

import flashtrain

pytestmark = pytest.mark.integration  # whole runs


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    place = tmp_path_factory.mktemp("text")
    return {**TASKS["language"](place), "data.cache_dir": place}


@pytest.fixture(scope="module")
def half(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that failed after its first validation and best.ckpt, with another
    validation to come."""
    return interrupted(settings, tmp_path_factory.mktemp("half"), 8, fail, Ended)


@pytest.fixture(scope="module")
def half_in_shards(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return interrupted({**settings, **SHARDS}, tmp_path_factory.mktemp("half"), 8, fail, Ended)


def name_everywhere(file: Path, checkpoints: Path, path: str) -> None:
    """Let all that Lightning's checkpoint callbacks have in a file as a path be this one, which any
    better model replaces; their folder is the run's, for they believe the rest of no other."""
    checkpoint: dict[str, Any] = torch.load(file, weights_only=True)
    worst = torch.tensor(99.0)
    names = ("best_model_path", "kth_best_model_path", "last_model_path")
    paths = {
        **dict.fromkeys(names, path),
        "dirpath": str(checkpoints),
        "best_k_models": {path: worst},
    }
    scores = {
        "best_model_score": worst,
        "current_score": worst,
        "kth_value": worst,
        "monitor": "validation_loss",
    }
    states = [
        state
        for name, state in checkpoint["callbacks"].items()
        if "Checkpoint" in name or {*names} & {*state}
    ]
    assert states
    for state in states:
        state.update(paths | scores)
    torch.save(checkpoint, file)


def everything(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("form", ["absolute", "..", "link", "address", "in shards"])
def test_a_path_in_a_checkpoint_is_not_believed(
    form: str, request, settings: Settings, tmp_path: Path
) -> None:
    half = request.getfixturevalue("half_in_shards" if form == "in shards" else "half")
    settings = {**settings, **(SHARDS if form == "in shards" else {})}
    victims, folder = tmp_path / "victims", tmp_path / "runs" / "run"
    (victims / "folder.ckpt").mkdir(parents=True)
    for name in ("best.ckpt", "last.ckpt", "folder.ckpt/file"):
        (victims / name).write_text("somebody else's")
    before = everything(victims)
    for victim in ("best.ckpt", "last.ckpt", "folder.ckpt"):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(half, folder)
        checkpoints = folder / "checkpoints"
        upwards = checkpoints / os.path.relpath(victims, checkpoints)
        named = {"absolute": victims, "..": upwards, "in shards": upwards}
        named |= {"link": checkpoints / "link", "address": f"local://{victims}"}
        for file in [path for path in checkpoints.rglob("*.ckpt") if path.is_file()]:
            name_everywhere(file, checkpoints, f"{named[form]}/{victim}")
        if form == "link":
            (checkpoints / "link").symlink_to(victims)
        flashtrain.evaluate(checkpoints / "last.ckpt", hardware="cpu")
        assert everything(victims) == before
        # A folder with a link that leads out of it may be refused as a whole.
        with (
            contextlib.suppress(flashtrain.UserError)
            if form == "link"
            else contextlib.nullcontext()
        ):
            train(settings, tmp_path, resume=folder)
            assert summary(folder)["status"] == "finished"
        assert everything(victims) == before


WRITTEN = (
    "config.yaml", "summary.json", "metrics.*", "flashtrain.log", "report.html", "sample.txt",
    "tokenizer",
    "checkpoints", "checkpoints/last.ckpt", "checkpoints/best.ckpt",
    "checkpoints/last.ckpt.partial", ".lock",
)  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_nothing_is_written_through_a_link_that_leads_out(
    name: str, half: Path, settings: Settings, tmp_path: Path
):
    """The link stands for what a run writes there; where it leads is as it
    was, or still nothing."""
    folder = Path(shutil.copytree(half, tmp_path / "runs" / "run"))
    place = next(folder.glob(name), folder / name)
    (tmp_path / "victims").mkdir()
    victim = tmp_path / "victims" / place.name
    if place.exists():
        place.rename(victim)
    place.symlink_to(victim)
    before = everything(tmp_path / "victims")
    with contextlib.suppress(flashtrain.UserError):
        train(settings, tmp_path, resume=folder)
    assert everything(tmp_path / "victims") == before
