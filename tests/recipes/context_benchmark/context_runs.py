"""Whole benchmarks over gloo ranks for test_context_benchmark.py: one start of Python, the
ranks are forked from it.

python context_runs.py FOLDER  writes FOLDER/NAME/ (a run's folder), FOLDER/NAME.out and
                               FOLDER/codes.json
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2]))  # tests/, for the next
from jobs import run_job

from flashtrain.command.compose import compose_settings
from flashtrain_recipes.context_benchmark.baselines.flashtrain import Flashtrain
from flashtrain_recipes.harness import processes

WORDS = (
    "recipe=long-context-benchmark", "hardware=cpu", "hardware.demo=never", "logger=none",
    "benchmark.dtype=float32",
    "benchmark.degrees=[2]", "benchmark.rounds=2", "benchmark.shapes=[4/2x16]",
    "benchmark.masks=[causal]",
    "benchmark.seqlens=[64]",
)  # fmt: skip
SMALL = (
    "benchmark.methods=[all-gather,ring]",
    "benchmark.layouts=[zigzag]",
    "benchmark.implementations=[flashtrain]",
)
RUNS = {
    "grid": (
        "benchmark.masks=[window-9,causal-document]", "benchmark.seqlens=[96,64]",
        "benchmark.rounds=1",
        "benchmark.one_device_longest=64", "benchmark.check_longest=64",
        "benchmark.layouts=[balanced,contiguous,planned]",
    ),
    "degrees": (
        "benchmark.degrees=[2,4]", "benchmark.methods=[hybrid,ring]",
        "benchmark.layouts=[balanced]",
        "benchmark.shapes=[6/2x16]",
    ),
    "full": ("benchmark.seqlens=[64,96]", *SMALL),
    "fails": ("benchmark.seqlens=[64,96]", *SMALL),
    "dies": SMALL,
}  # fmt: skip


def ring_of_rank_1(happening: Callable[[], object]):
    """In place of Flashtrain.attend: the second rank's ring does this instead, while the
    first waits for its keys."""
    real = Flashtrain.attend

    def attend(self, place, q, k, v):
        attention = real(self, place, q, k, v)
        if self.way != "ring" or place.team.rank != 1 or place.case.attention.seqlen_q != 64:
            return attention
        return attention._replace(call=lambda *_: happening())

    return patch.object(Flashtrain, "attend", attend)


def raising(error: Exception) -> Callable[[], None]:
    def happening():
        raise error

    return happening


HAPPENINGS = {
    "full": raising(torch.OutOfMemoryError("CUDA out of memory")),
    "fails": raising(ValueError("a mistake")),
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def run(folder: Path, name: str) -> int:
    """One run in a process of its own, whose output goes to a file."""
    process = multiprocessing.get_context("fork").Process(
        target=in_process, args=(folder, name, RUNS[name])
    )
    process.start()
    process.join(600)
    return process.exitcode if process.exitcode is not None else -1


def in_process(folder: Path, name: str, words: tuple[str, ...]) -> None:
    with (folder / f"{name}.out").open("w") as printed:
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)
    processes.START_METHOD = "fork"
    own = folder / name
    own.mkdir()
    keys = {word.split("=")[0] for word in words}
    words = (*(word for word in WORDS if word.split("=")[0] not in keys), *words)
    with (
        ring_of_rank_1(HAPPENINGS.get(name, lambda: None))
        if name in HAPPENINGS
        else patch.dict(os.environ)
    ):
        status = run_job(
            compose_settings(words), own, overrides=list(words), started=time.monotonic()
        )
    assert not dist.is_initialized()
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    into = Path(sys.argv[1])
    codes = {name: run(into, name) for name in RUNS}
    (into / "codes.json").write_text(json.dumps(codes))
