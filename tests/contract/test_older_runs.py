"""A run that is older than some settings goes on as it began, however it is resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from contract_runs import Ended, Settings, assert_same_run, fail, interrupted, language, train

from flashtrain.folders.run_folder import SETTINGS
from flashtrain.settings.aliases import NEWER

pytestmark = pytest.mark.integration  # whole runs


def forget(content: dict[str, Any]) -> None:
    for name in NEWER:
        group, _, key = name.rpartition(".")
        content[group].pop(key, None)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A training on a folder of which today's defaults read more than older ones did."""
    place = tmp_path_factory.mktemp("text")
    found = language(place)
    (place / "texts").mkdir()
    shutil.move(found["data.path"], place / "texts" / "train.txt")
    (place / "texts" / "program.py").write_text("print('a program, which is a text too')\n" * 30)
    return {**found, "data.path": place / "texts"}


@pytest.fixture(scope="module")
def older(settings: Settings) -> Settings:
    """The same as a version did it that had none of the newer settings."""
    return {
        **settings,
        **{name: value for name, value in NEWER.items() if name.startswith("data.")},
    }


@pytest.fixture(scope="module")
def whole(older: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(older, tmp_path_factory.mktemp("whole"))


@pytest.fixture
def half(older: Settings, tmp_path: Path) -> Path:
    """A run that ended in its fifth step, as that version left it."""
    folder = interrupted(older, tmp_path, 8, fail, Ended)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    forget(config)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    last = folder / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(last, weights_only=True)
    del checkpoint[SETTINGS]
    torch.save(checkpoint, last)
    return folder


@pytest.mark.parametrize("named", [True, False], ids=["resume=RUN", "resume=auto"])
def test_an_older_run_is_continued_on_its_own_samples(
    named: bool,
    settings: Settings,
    half: Path,
    whole: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        assert train(settings, tmp_path, resume=half if named else "auto", quiet=False) == half
    assert_same_run(half, whole)
    (line,) = [line for line in caplog.messages if line.startswith(f"as in {half}: ")]
    assert "data.special_tokens=chat" in line
    assert "data.files=['*.parquet', '*.txt'" in line
