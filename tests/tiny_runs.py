"""A tiny configuration that trains in a second on a CPU, and the ways to run it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from filelock import FileLock

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
    "generate.max_new_tokens=8",
)


TINY_ENCODER = (
    "hardware=cpu",
    "hardware.demo=never",
    "bert.size=tiny",
    "schedule.warmup_steps=1",
    "trainer.steps=4",
    "trainer.log_every=1",
    "trainer.validate_every=2",
    "trainer.checkpoint_every=2",
)


def each(names: Iterable[str], *quick: str) -> list[ParameterSet]:
    """The names as parameters of a test that is an integration test but for
    those that are quick."""
    return [
        pytest.param(name, marks=[] if name in quick else [pytest.mark.integration])
        for name in names
    ]


def wait_for(condition: Callable[[], object]) -> bool:
    """Whether it comes true in ten minutes, which is long for any machine."""
    until = time.monotonic() + 600
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return bool(found)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Path]) -> Path:
    """A copy, for this process of tests alone, of the folder that the first of
    them to ask for it makes.

    make: called with a folder of that name, gives the folder of the finished run in it.
    """
    temporary = factory.getbasetemp()
    place = (
        temporary.parent if "PYTEST_XDIST_WORKER" in os.environ else temporary
    ) / f"once-{name}"
    with FileLock(f"{place}.lock"):
        if not (place / "run").is_file():  # names the folder once it is whole
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            (place / "run").write_text(str(make(place)))
    return shutil.copytree((place / "run").read_text(), factory.mktemp("copies") / name)


def last_weights(folder: Path) -> dict[str, Any]:
    """The state of a run's last checkpoint, by name."""
    from flashtrain.training.checkpoints import read_checkpoint

    return read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]


def run_mode(*words: str) -> int:
    """Run a mode of a checkpoint in this process. Returns the exit status."""
    from flashtrain.command import modes
    from flashtrain.command.checkpoint_settings import settings_from_checkpoint

    return modes.run_mode(settings_from_checkpoint(words))


@dataclass
class TinyRuns:
    """Starts runs of the tiny configuration: `words` are the overrides,
    `folder` a place for its runs."""

    folder: Path
    words: list[str]

    def settings_words(self, *extra: str) -> list[str]:
        keys = {word.split("=", 1)[0] for word in extra}
        return [*(word for word in self.words if word.split("=", 1)[0] not in keys), *extra]

    def run(self, name: str, *extra: str) -> tuple[int, Path]:
        """Run in this process, in the folder `name`. Returns (exit status, run folder)."""
        from jobs import run_job

        from flashtrain.command.compose import compose_settings

        words = self.settings_words(*extra)
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        return run_job(
            compose_settings(words), folder, overrides=words, started=time.monotonic()
        ), folder

    def finished(self, folder: Path, *extra: str) -> Path:
        """The folder of a run, in this process, that ended well, for made_once."""
        status, made = replace(self, folder=folder).run("finished", *extra)
        assert status == 0
        return made

    def command(
        self, *extra: str, launcher: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run `python -m flashtrain` with these words on top of the tiny ones,
        as a process of its own."""
        return flashtrain_command(*self.settings_words(*extra), cwd=self.folder, launcher=launcher)


def checkout_environment() -> dict[str, str]:
    """This process's, with the checkout on the import path."""
    path = os.pathsep.join(
        [str(ROOT), str(ROOT / "recipes"), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    )
    return {**os.environ, "PYTHONPATH": path}


def flashtrain_command(
    *words: str, cwd: Path, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run `python -m flashtrain` in the folder `cwd`, with the checkout on the import path.

    launcher: the module that starts it, and its arguments, in place of Python itself.
    """
    environment = {**checkout_environment(), "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *launcher, "flashtrain", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
