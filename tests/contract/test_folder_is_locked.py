"""The folder of a run that lives is its process's alone, until that has ended, however it ended."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from contract_runs import language, train
from forked_commands import end, start

import flashtrain

pytestmark = pytest.mark.integration  # a process


def test_a_second_process_is_refused_until_the_first_was_killed(tmp_path: Path) -> None:
    settings = {**language(tmp_path), "data.cache_dir": tmp_path, "trainer.steps": 10**6}
    folder = tmp_path / "run"
    (process,) = start({**settings, "hydra.run.dir": folder}, tmp_path / "printed")
    while not (folder / "checkpoints" / "last.ckpt").exists() and process.is_alive():
        time.sleep(0.02)
    before = (folder / "config.yaml").read_bytes()
    with pytest.raises(flashtrain.UserError, match=str(folder)):
        train(settings, tmp_path, resume=folder)
    assert process.is_alive()
    assert (folder / "config.yaml").read_bytes() == before
    process.kill()
    assert end([process]) == [-9]
    assert train(settings, tmp_path, resume=folder, **{"trainer.max_minutes": 1e-6}) == folder
