"""Gloo ranks are started once for all tests of this folder: starting them takes longer than what they do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).parent))

from ranks import finish, start


class Launch:
    """What the ranks of one launch wrote, their exit codes and what they printed."""

    def __init__(self, folder: Path, report: dict[str, Any]) -> None:
        self.folder = folder
        self.codes: list[int] = report["codes"]
        self.outputs: list[str] = report["outputs"]
        self._found: list[dict[str, Any]] = []

    def found(self, what: str) -> list[Any]:
        """Each rank's; fails with what was printed where a rank did not come so far."""
        files = [self.folder / f"{rank}.json" for rank in range(len(self.codes))]
        assert all(file.is_file() for file in files), "\n\n".join(self.outputs)[-6000:]
        self._found = self._found or [json.loads(file.read_text()) for file in files]
        return [of_rank[what] for of_rank in self._found]


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory, worker_id):
    """One for all workers of the session."""
    base = tmp_path_factory.getbasetemp()
    return (base if worker_id == "master" else base.parent) / "context"


def launch(shared: Path, scenario: str, ranks: int, **variables: str) -> Launch:
    """strategy_ranks.py on so many ranks, unless another worker has run it already."""
    folder = shared / scenario
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(shared / f"{scenario}.lock"):
        report = folder / "report.json"
        if not report.is_file():
            codes, outputs = finish(start("strategy_ranks.py", ranks, folder, scenario, **variables))
            report.write_text(json.dumps({"codes": codes, "outputs": outputs}))
    return Launch(folder, json.loads(report.read_text()))


@pytest.fixture(scope="session")
def four(shared_folder):
    return launch(shared_folder, "four", 4)


@pytest.fixture(scope="session")
def two(shared_folder, four):
    """After four, whose checkpoint it continues."""
    four.found("begun")
    return launch(shared_folder, "two", 2, BEGUN=str(four.folder))
