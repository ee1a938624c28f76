"""recipe=pathfinder-preview: a picture of the images, with a row that says what was drawn."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from jobs import run_job
from PIL import Image

from flashtrain.__main__ import main
from flashtrain.command.compose import compose_settings


def preview(folder: Path, *words: str) -> int:
    words = (
        "recipe=pathfinder-preview",
        "hardware=cpu",
        "pathfinder.side=32",
        f"pathfinder.cache_dir={folder / 'cache'}",
        f"output={folder}",
        *words,
    )
    return run_job(
        compose_settings(words), folder / "run", overrides=list(words), started=time.monotonic()
    )


@pytest.mark.slow  # numba compiles the walks
def test_it_draws_as_many_images_as_asked(tmp_path: Path) -> None:
    assert preview(tmp_path, "pathfinder.preview=7") == 0
    row = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (row["status"], row["images"], row["side"], row["contour"]) == (
        "finished",
        7,
        32,
        "hard",
    )
    with Image.open(tmp_path / "run" / "samples.png") as picture:
        assert picture.width == 1200


def test_its_plan_reports_what_would_be_drawn_and_of_no_training(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    words = ["recipe=pathfinder-preview", "mode=plan", "pathfinder.side=64", f"output={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["flashtrain", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "24 images of side 64, hard contours, seed 0" in told
    assert "nothing was started" in told
    assert "gpt2" not in told
    assert not list(tmp_path.iterdir())
