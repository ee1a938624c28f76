"""A signal before the first step: one line, the signal's exit status, and nothing half left."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_runs import TinyRuns, checkout_environment, wait_for

from flashtrain.interruption import Interrupted, handle, interrupt, restore

pytestmark = pytest.mark.integration  # processes


def started(words: list[str], folder: Path, **options) -> subprocess.Popen[str]:
    environment = {**checkout_environment(), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **options}
    return subprocess.Popen(
        [sys.executable, "-m", "flashtrain", *words], cwd=folder, env=environment, **streams
    )


def until_it_says(process: subprocess.Popen[str], part: str) -> None:
    assert process.stdout is not None
    assert any(part in line for line in process.stdout), f"it ended before it said {part}"


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda one: one.name
)
def test_a_signal_while_tokenizing_ends_in_a_line_and_leaves_nothing(
    tiny_runs: TinyRuns, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "large.txt").write_text(
        "the quick brown fox jumps over the lazy dog\n\n" * 1_000_000
    )
    words = [
        f"data.path={tmp_path / 'large.txt'}",
        f"data.cache_dir={tmp_path / 'cache'}",
        f"output={tmp_path / 'runs'}",
    ]
    process = started(tiny_runs.settings_words(*words), tmp_path)
    until_it_says(process, "tokenizing")
    process.send_signal(number)
    said, _ = process.communicate()
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert (process.returncode, said) == (128 + number, f"flashtrain: stopped by {name}\n")
    assert not list((tmp_path / "runs").glob("*/*"))
    assert [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda one: one.name)
def test_a_signal_in_a_mode_of_a_checkpoint_ends_in_a_line(
    trained: Path, number: signal.Signals
) -> None:
    process = started(
        ["mode=generate", f"checkpoint={trained}", "generate.max_new_tokens=1000000"], trained
    )
    time.sleep(3)  # wherever it is: in an import, reading or writing
    process.send_signal(number)
    said, _ = process.communicate()
    assert (process.returncode, said) == (128 + number, f"flashtrain: stopped by {number.name}\n")


def test_a_run_whose_terminal_is_closed_saves_its_checkpoint(
    tiny_runs: TinyRuns, tmp_path: Path
) -> None:
    master, slave = pty.openpty()
    words = tiny_runs.settings_words("trainer.steps=100000", f"hydra.run.dir={tmp_path / 'run'}")
    process = started(
        words, tmp_path, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    assert wait_for((tmp_path / "run" / "checkpoints" / "last.ckpt").exists)
    os.close(master)
    process.send_signal(signal.SIGHUP)
    assert process.wait() == 129
    assert "(SIGHUP), checkpoint saved" in (tmp_path / "run" / "flashtrain.log").read_text()


def test_signals_that_come_together_interrupt_once_and_ctrl_c_always() -> None:
    """A closed terminal and its shell both send SIGHUP: the second one does not
    interrupt the cleaning up."""
    before = handle(interrupt)
    try:
        with pytest.raises(Interrupted, match="stopped by SIGHUP"):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted, match="stopped by Ctrl-C"):
            signal.raise_signal(signal.SIGINT)
    finally:
        restore(before)
