"""A tiny BERT on a small text, and ways to train it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import TINY_ENCODER, TinyRuns, made_once

TINY_BERT = (
    "recipe=bert",
    *TINY_ENCODER,
    "logger=csv",
    "data=files",
    "data.tokenizer=bytes",
    "data.validation_fraction=0.3",
    "bert.family=bert",
    "context=64",
    "masked.sample_unit=sentence",
    "masked.token_budget=128",
    "masked.validation_samples=8",
    "optimizer.learning_rate=0.001",
    "trainer.tokens_per_step=256",
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
