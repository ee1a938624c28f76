"""The tiny model that tests/training use is used here too, and the ranks of context/ranks.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
sys.path.insert(0, str(Path(__file__).parent / "context"))
sys.path.insert(0, str(Path(__file__).parent))

from distributed_ranks import launch_once


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """What two_ranks.py wrote: a folder of each of its scenarios."""
    return launch_once("two_ranks.py", tmp_path_factory, worker_id)


@pytest.fixture(scope="session")
def huggingface_ranks(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """What huggingface_ranks.py wrote, which huggingface_training.py calls: a folder for two ranks, one for four."""
    return launch_once("huggingface_training.py", tmp_path_factory, worker_id) / "exact"


@pytest.fixture(scope="session")
def huggingface_training(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """What huggingface_training.py wrote."""
    return launch_once("huggingface_training.py", tmp_path_factory, worker_id)


@pytest.fixture(scope="session")
def huggingface_strategies(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """What huggingface_strategies.py wrote: a folder of each of its scenarios."""
    return launch_once("huggingface_strategies.py", tmp_path_factory, worker_id)
