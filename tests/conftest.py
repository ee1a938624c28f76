"""What the tests of whole runs share: a tiny configuration on a small text, and one run of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

TINY = (
    "recipe=gpt2",
    "hardware=cpu",
    "data=files",
    "data.tokenizer=bytes",
    "data.validation_fraction=0.2",
    "data.validation_tokens=256",
    "context=32",
    "model.size=demo",
    "model.vocab_rows=null",
    "trainer.steps=6",
    "trainer.tokens_per_step=256",
    "trainer.micro_batch=4",
    "trainer.log_every=1",
    "trainer.validate_every=3",
    "trainer.checkpoint_every=3",
    "optimizer.learning_rate=0.003",
    "logger=csv",
    "generate.tokens=8",
)


@dataclass
class TinyRuns:
    """Starts runs of the tiny configuration: `words` are the overrides, `folder` a place for its runs."""

    folder: Path
    words: list[str]

    def settings_words(self, *extra: str) -> list[str]:
        keys = {word.split("=", 1)[0] for word in extra}
        return [*(word for word in self.words if word.split("=", 1)[0] not in keys), *extra]

    def run(self, name: str, *extra: str) -> tuple[int, Path]:
        """Run in this process, in the folder `name`. Returns (exit status, run folder)."""
        from flashtrain.compose import compose_settings
        from flashtrain.job import run_job

        words = self.settings_words(*extra)
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        return run_job(compose_settings(words), folder, overrides=words, started=time.time()), folder

    def command(self, *extra: str, cwd: Path | None = None, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        """Run `python -m flashtrain` with these words on top of the tiny ones, as a process of its own."""
        return flashtrain_command(*self.settings_words(*extra), cwd=cwd or self.folder, timeout=timeout)


def flashtrain_command(*words: str, cwd: Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run `python -m flashtrain` in the folder `cwd`, with the checkout on the import path."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = {**os.environ, "PYTHONPATH": path, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "flashtrain", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten small documents that a byte model can learn something of."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(10):
        line = f"document {number} says that the quick brown fox jumps over the lazy dog. "
        (folder / f"{number}.txt").write_text(line * 20)
    return folder


@pytest.fixture(scope="session")
def tiny_runs(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyRuns:
    folder = tmp_path_factory.mktemp("runs")
    cache = tmp_path_factory.mktemp("cache")
    return TinyRuns(folder, [*TINY, f"data.path={text_folder}", f"data.cache_dir={cache}", f"output={folder}"])


@pytest.fixture(scope="session")
def trained(tiny_runs: TinyRuns) -> Path:
    """The folder of one finished tiny run."""
    status, folder = tiny_runs.run("trained")
    assert status == 0
    return folder


Run = Callable[..., tuple[int, Path]]
