"""SIGKILL at random moments: last.ckpt is whole or not there yet, and resumed the run ends
as if nothing had been.

FLASHTRAIN_KILLS=N: so many kills of each kind. FLASHTRAIN_SEED=N: other moments;
what failed says which.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from contract_runs import SHARDS, assert_same_run, language, last_step, streamed, summary
from forked_commands import end, run, start

import flashtrain

pytestmark = pytest.mark.integration  # whole runs, in processes

KILLS = int(os.environ.get("FLASHTRAIN_KILLS", "3"))
SEED = os.environ.get("FLASHTRAIN_SEED", "1")
MEMORY = Path("/dev/shm")  # another file system than that of the runs, on Linux
# A checkpoint each step, which takes longer than the step.
OFTEN = {
    "trainer.steps": 30,
    "trainer.checkpoint_every": 1,
    "trainer.validate_every": 10,
    "schedule": "constant",
}


@pytest.fixture
def temporary(request, tmp_path: Path):
    """A folder for TMPDIR, on the file system of the runs or on another."""
    if request.param == "TMPDIR beside":
        (tmp_path / "temporary").mkdir()
        yield tmp_path / "temporary"
    elif not MEMORY.is_dir() or MEMORY.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no other file system to put temporary files on")
    else:
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            yield Path(folder)


@pytest.mark.longest
@pytest.mark.parametrize(
    ("kind", "ranks", "temporary"),
    [
        ("file", 1, "TMPDIR beside"),
        ("file", 1, "TMPDIR elsewhere"),
        ("folder", 1, "TMPDIR elsewhere"),
        ("folder", 2, "TMPDIR beside"),
        ("streamed", 2, "TMPDIR beside"),
    ],
    indirect=["temporary"],
)
def test_kills_cost_no_checkpoint_and_change_nothing(
    kind: str, ranks: int, temporary: Path, tmp_path: Path
) -> None:
    text = streamed(tmp_path) if kind == "streamed" else language(tmp_path)
    settings = {**text, **OFTEN, "data.cache_dir": tmp_path, "trainer.devices": ranks}
    settings |= SHARDS if kind == "folder" else {}
    whole, folder = tmp_path / "whole", tmp_path / "run"
    run({**settings, "hydra.run.dir": whole}, tmp_path / "printed-by-whole", ranks)
    last = folder / "checkpoints" / "last.ckpt"
    chosen = random.Random(f"{SEED} {kind} {ranks} {temporary.parent == tmp_path}")
    kills, step, finished = 0, 0, True
    while kills < KILLS or not finished:
        if finished or not last.exists():
            shutil.rmtree(folder, ignore_errors=True)
            step = 0
        where = "resume" if last.exists() else "hydra.run.dir"
        processes = start({**settings, where: folder}, tmp_path / "printed", ranks, temporary)
        if kills < KILLS:
            # As a rule while it writes, else also before it writes its first.
            if chosen.random() < 0.8:
                for _ in range(chosen.randrange(1, 50)):
                    wait_for_change(last.parent, processes)
                time.sleep(chosen.uniform(0, 0.02))
            else:
                time.sleep(chosen.uniform(0, 3))
            for process in processes:
                process.kill()
        statuses = end(processes)
        assert set(statuses) <= {-9, 0}, (tmp_path / "printed" / "printed-0").read_text()
        kills += any(statuses)
        # It may have been killed when all was written.
        finished = not any(statuses) or ended(folder)
        if last.is_file():
            assert last_step(folder) >= step
            step = last_step(folder)
        elif last.exists():
            assert flashtrain.load(last, hardware="cpu").model
        if finished:
            assert_same_run(folder, whole)


def wait_for_change(checkpoints: Path, processes: list[Any]) -> None:
    """Until a file or folder in there is new, longer, newer or gone; or the
    processes have ended."""
    before = found = files_of(checkpoints)
    while found == before and all(process.is_alive() for process in processes):
        time.sleep(0.001)
        found = files_of(checkpoints)


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    # Passes over folders that have gone; Path.rglob does not.
    for inside, folders, files in os.walk(folder):
        for path in (Path(inside, name) for name in folders + files):
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                found[str(path)] = about.st_size, about.st_mtime_ns
    return found


def ended(folder: Path) -> bool:
    return (folder / "summary.json").exists() and summary(folder)["status"] == "finished"
