"""The tiny model that tests/training use is used here too, and ranks that are
started once a session."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
sys.path.insert(0, str(Path(__file__).parent / "context"))
sys.path.insert(0, str(Path(__file__).parent))

from ranks import launch_once, of_ranks


def launched(script: str, part: str = ".") -> Any:
    """A fixture: the folder in which a script wrote a folder for each of its
    scenarios, or a part of it."""

    @pytest.fixture(scope="session")
    def folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
        return launch_once(script, tmp_path_factory, worker_id) / part

    return folder


two_ranks = launched("two_ranks.py")
sharded_ranks = launched("sharded_ranks.py")
huggingface_strategies = launched("huggingface_strategies.py")
huggingface_training = launched("huggingface_training.py")
# Which huggingface_training.py starts too.
huggingface_ranks = launched("huggingface_training.py", "exact")
hybrid_ranks = launched("hybrid_ranks.py")
strategy_ranks = launched("context/strategy_ranks.py")
planned_ranks = launched("context/planned_ranks.py")


def by_name(ranks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """What ranks reported: under each name what each of them found."""
    return {name: [of_rank[name] for of_rank in ranks] for name in ranks[0]}


@pytest.fixture(scope="session")
def four(strategy_ranks: Path) -> dict[str, list[Any]]:
    return by_name(of_ranks(strategy_ranks / "four", 4))


@pytest.fixture(scope="session")
def two(strategy_ranks: Path) -> dict[str, list[Any]]:
    return by_name(of_ranks(strategy_ranks / "two", 2))
