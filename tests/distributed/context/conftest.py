"""Gloo ranks are started once for all tests of this folder: starting them takes longer than what they do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).parent))

from ranks import run_script


class Launch:
    """What the ranks of one job wrote, their exit codes and what they printed."""

    def __init__(self, folder: Path, printed: str) -> None:
        codes = folder / "codes.json"
        assert codes.is_file(), printed[-6000:]
        self.codes: list[int] = json.loads(codes.read_text())
        self.told = sorted(path.read_text() for path in folder.glob("*.told"))  # what a watchdog said before its end
        self.outputs = [(folder / f"{rank}.out").read_text() for rank in range(len(self.codes))]
        files = [folder / f"{rank}.json" for rank in range(len(self.codes))]
        assert all(file.is_file() for file in files), "\n\n".join(self.outputs)[-6000:]
        self._found = [json.loads(file.read_text()) for file in files]

    def found(self, what: str) -> list[Any]:
        """Each rank's."""
        return [of_rank[what] for of_rank in self._found]


@pytest.fixture(scope="session")
def launched(tmp_path_factory, worker_id):
    """strategy_ranks.py, run by whichever worker of the session comes first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "context"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        printed = folder / "printed"
        if not printed.is_file():
            printed.write_text(run_script("strategy_ranks.py", folder, CUDA_VISIBLE_DEVICES="")[1])
    return folder, printed.read_text()


@pytest.fixture(scope="session")
def four(launched):
    folder, printed = launched
    return Launch(folder / "four", printed)


@pytest.fixture(scope="session")
def two(launched):
    folder, printed = launched
    return Launch(folder / "two", printed)
