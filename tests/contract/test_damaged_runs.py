"""A run of which something was damaged or changed goes on with a line, or is
refused with the file's name."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch
from contract_runs import Ended, Settings, fail, interrupted, language, summary, train

import flashtrain
from flashtrain.command.request import settings_of
from flashtrain.run.job import Job
from flashtrain.run.machine import adapt_to_machine
from flashtrain.settings.command_line import CommandLine

pytestmark = pytest.mark.integration  # whole runs


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    place = tmp_path_factory.mktemp("text")
    return {**language(place), "data.cache_dir": place / "cache"}


@pytest.fixture(scope="module")
def half(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that failed after its first validation and best.ckpt."""
    return interrupted(settings, tmp_path_factory.mktemp("half"), 8, fail, Ended)


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 64
    file.write_bytes(content)


@pytest.fixture
def folder(half: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(half, tmp_path / "runs" / "run"))


def test_a_changed_byte_in_the_weights_of_last_ckpt(
    settings: Settings, folder: Path, tmp_path: Path
) -> None:
    last = folder / "checkpoints" / "last.ckpt"
    before = summary(folder)
    flip(last, last.stat().st_size // 2)
    with pytest.raises(flashtrain.UserError, match=f"{last} is damaged"):
        train(settings, tmp_path, resume=folder)
    assert summary(folder) == before


def test_a_changed_byte_in_best_ckpt(settings: Settings, folder: Path, tmp_path: Path) -> None:
    best = folder / "checkpoints" / "best.ckpt"
    flip(best, best.stat().st_size // 2)
    with pytest.raises(flashtrain.UserError, match=f"{best} is damaged"):
        flashtrain.evaluate(best, hardware="cpu")
    train(settings, tmp_path, resume=folder)
    assert summary(folder)["status"] == "finished"


def test_a_changed_byte_in_the_token_cache(
    settings: Settings, folder: Path, tmp_path: Path
) -> None:
    cache = Path(shutil.copytree(settings["data.cache_dir"], tmp_path / "cache"))
    tokens = max(cache.glob("*/tokens.bin"), key=lambda path: path.stat().st_size)
    flip(tokens, 10)
    with pytest.raises(flashtrain.UserError, match=f"{tokens} has changed since it was written"):
        train({**settings, "data.cache_dir": cache}, tmp_path, resume=folder)


def printed(capfd) -> str:
    found = capfd.readouterr()
    return found.out + found.err


def test_a_damaged_best_ckpt_and_damaged_metrics(
    settings: Settings, folder: Path, tmp_path: Path, capfd
) -> None:
    """The rest of the run is what it is without the damage."""
    whole = Path(shutil.copytree(folder, tmp_path / "whole" / "run"))
    best, metrics = folder / "checkpoints" / "best.ckpt", folder / "metrics.jsonl"
    best.write_bytes(best.read_bytes()[:1000])
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"\xff" + b"".join(lines))
    train(settings, tmp_path, resume=folder)
    said = printed(capfd)
    assert f"{best} cannot be read" in said
    assert f"{metrics} has 1 damaged lines" in said
    train(settings, tmp_path, resume=whole)
    said = printed(capfd)
    for word in (
        "cannot be read",
        "damaged",
        "has changed",
        "stores no settings",
        "curves have a gap",
        "no checksums",
    ):
        assert word not in said
    mine, theirs = (
        torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (folder, whole)
    )
    assert all(
        torch.equal(value, theirs["state_dict"][name]) for name, value in mine["state_dict"].items()
    )


def test_lost_metrics(settings: Settings, folder: Path, tmp_path: Path, capfd) -> None:
    (folder / "metrics.jsonl").unlink()
    train(settings, tmp_path, resume=folder)
    assert f"{folder / 'metrics.jsonl'} has no rows of steps 0 to " in printed(capfd)


def test_another_text_of_the_same_length(
    settings: Settings, folder: Path, tmp_path: Path, capfd
) -> None:
    text = tmp_path / "train.txt"
    text.write_text(Path(settings["data.path"]).read_text()[::-1])
    train({**settings, "data.path": text}, tmp_path, resume=folder)
    assert "resuming with data that has changed (text bytes-" in printed(capfd)


def edited(folder: Path, before: str, after: str) -> None:
    config = folder / "config.yaml"
    assert config.read_text().count(before) == 1
    config.write_text(config.read_text().replace(before, after))


def test_a_changed_line_of_config_yaml(folder: Path, caplog) -> None:
    edited(folder, "  learning_rate: 0.003\n", "  learning_rate: 0.002\n")
    with caplog.at_level("INFO"):
        run(folder)
    assert f"{folder}/config.yaml has changed since last.ckpt was saved: " in caplog.text
    assert "optimizer.learning_rate 0.003 -> 0.002" in caplog.text
    assert summary(folder)["status"] == "finished"


def test_a_lost_line_of_config_yaml(folder: Path, caplog) -> None:
    edited(folder, "  learning_rate: 0.003\n", "")
    before = (folder / "config.yaml").read_text()
    with pytest.raises(
        flashtrain.UserError, match=rf"{folder}/config\.yaml lacks optimizer\.learning_rate=0\.003"
    ):
        run(folder)
    assert (folder / "config.yaml").read_text() == before


def run(folder: Path) -> None:
    """As `python -m flashtrain resume=FOLDER` does."""
    line = CommandLine([f"resume={folder}"])
    Job(*adapt_to_machine(settings_of(line), line), folder, line).run(started=time.time())
