"""The tiny model that tests/training use is used here too, and ranks that are started once a session."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
sys.path.insert(0, str(Path(__file__).parent / "context"))
sys.path.insert(0, str(Path(__file__).parent))

from ranks import launch_once


def launched(script: str, part: str = ".") -> Any:
    """A fixture: the folder in which a script wrote a folder for each of its scenarios, or a part of it."""

    @pytest.fixture(scope="session")
    def folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
        return launch_once(script, tmp_path_factory, worker_id) / part

    return folder


two_ranks = launched("two_ranks.py")
sharded_ranks = launched("sharded_ranks.py")
huggingface_strategies = launched("huggingface_strategies.py")
huggingface_training = launched("huggingface_training.py")
huggingface_ranks = launched("huggingface_training.py", "exact")  # which huggingface_training.py starts too
strategy_ranks = launched("context/strategy_ranks.py")


class Launch:
    """What the ranks of one job of strategy_ranks.py reported, their exit codes and what they printed."""

    def __init__(self, folder: Path) -> None:
        self.codes: list[int] = json.loads((folder / "codes.json").read_text())
        self.verdicts = sorted(path.read_text() for path in folder.glob("*.verdict"))  # of watchdogs
        self.outputs = [(folder / f"{rank}.out").read_text() for rank in range(len(self.codes))]
        files = [folder / f"{rank}.json" for rank in range(len(self.codes))]
        assert all(file.is_file() for file in files), "\n\n".join(self.outputs)[-6000:]
        self._found = [json.loads(file.read_text()) for file in files]

    def found(self, what: str) -> list[Any]:
        """Each rank's."""
        return [of_rank[what] for of_rank in self._found]


@pytest.fixture(scope="session")
def four(strategy_ranks: Path) -> Launch:
    return Launch(strategy_ranks / "four")


@pytest.fixture(scope="session")
def two(strategy_ranks: Path) -> Launch:
    return Launch(strategy_ranks / "two")
