"""A tiny BERT on a small text, and ways to train it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import TinyRuns, made_once

TINY_BERT = (
    "recipe=bert",
    "hardware=cpu",
    "hardware.demo=never",
    "logger=csv",
    "data=files",
    "data.tokenizer=bytes",
    "data.validation_fraction=0.3",
    "bert.size=tiny",
    "bert.family=bert",
    "context=64",
    "masked.sample_unit=sentence",
    "masked.token_budget=128",
    "masked.validation_samples=8",
    "optimizer.learning_rate=0.001",
    "schedule.warmup_steps=1",
    "trainer.steps=4",
    "trainer.tokens_per_step=256",
    "trainer.log_every=1",
    "trainer.validate_every=2",
    "trainer.checkpoint_every=2",
)


@pytest.fixture(scope="session")
def bert_runs(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyRuns:
    folder, cache = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("cache")
    words = [*TINY_BERT, f"data.path={text_folder}", f"data.cache_dir={cache}", f"output={folder}"]
    return TinyRuns(folder, words)


@pytest.fixture(scope="session")
def trained_bert(bert_runs: TinyRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one finished run."""
    return made_once(tmp_path_factory, "masked", bert_runs.finished)
