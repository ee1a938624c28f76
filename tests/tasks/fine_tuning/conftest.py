"""Labelled texts small enough to check by hand, and ways to train on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import TINY_ENCODER, TinyRuns, made_once

TINY_HEAD = (
    "recipe=bert-finetune",
    *TINY_ENCODER,
    "logger=none",
    "context=16",
    "finetune.data=files",
    "finetune.pooling=max",
    "finetune.dropout=0",
    "finetune.batch=8",
    "optimizer.learning_rate=0.003",
)


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of which x and y are labels, several at once or none; with files for every part."""
    folder = tmp_path_factory.mktemp("texts")
    for part, count in (("train", 32), ("validation", 8), ("test", 8)):
        kinds = [("ab x", ["x"]), ("y cd", ["y"]), ("x and y", ["x", "y"]), ("abcd", [])]
        rows = [{"text": f"{kinds[n % 4][0]} {n}", "labels": kinds[n % 4][1]} for n in range(count)]
        write_lines(folder / f"{part}.jsonl", rows)
    return folder


@pytest.fixture(scope="session")
def head_runs(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyRuns:
    folder = tmp_path_factory.mktemp("runs")
    return TinyRuns(folder, [*TINY_HEAD, f"finetune.path={texts}", f"output={folder}"])


@pytest.fixture(scope="session")
def tuned(head_runs: TinyRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one finished run."""
    return made_once(tmp_path_factory, "tuned", head_runs.finished)
