"""A tiny curriculum that trains in a second, and ways to run it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import TinyRuns, made_once

TINY_CURRICULUM = (
    "recipe=pathx",
    "hardware=cpu",
    "logger=csv",
    "hardware.demo=never",
    "resume=null",
    "classifier.embed=16",
    "classifier.layers=1",
    "classifier.heads=1",
    "schedule.warmup_steps=1",
    "optimizer.learning_rate=0.003",
    "sequence.validation_samples=8",
    "pathfinder.contour=easy",
    "pathfinder.train_images=64",
    "pathfinder.validation_images=8",
    "pathfinder.test_images=40",
    "trainer.validate_every=3",
    "trainer.checkpoint_every=2",
    "trainer.log_every=1",
    (
        "curriculum.stages=[{side:24,steps:5,batch:4,learning_rate:0.003},{side:28,steps:4,"
        "batch:4,micro_batch:2}]"
    ),
)


@pytest.fixture(scope="session")
def curriculum(tmp_path_factory: pytest.TempPathFactory) -> TinyRuns:
    folder, cache = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("cache")
    return TinyRuns(folder, [*TINY_CURRICULUM, f"pathfinder.cache_dir={cache}", f"output={folder}"])


@pytest.fixture(scope="session")
def finished(curriculum: TinyRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one finished curriculum."""
    return made_once(tmp_path_factory, "curriculum", curriculum.finished)
