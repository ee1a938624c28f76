"""The attacks in full: 1,000 settings, 1,000 mutated files, 100 kills (`pytest -m attack`; about two hours on 2 cores).

FLASHTRAIN_ATTACKS=settings:50,files:50,kills:5 makes fewer. Seeds are by chance, and printed with each failure.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.attacks.__main__ import FULL
from tests.tiny_runs import ROOT

COUNTS = os.environ.get("FLASHTRAIN_ATTACKS", FULL)


@pytest.mark.attack
@pytest.mark.timeout(4 * 3600)
@pytest.mark.skipif(sys.platform != "linux", reason="forks, limits and counts as Linux does")
@pytest.mark.parametrize("counts", COUNTS.split(","))
def test_nothing_is_lost_let_in_or_told_in_a_traceback(counts: str) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'recipes'}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.attacks", counts]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
