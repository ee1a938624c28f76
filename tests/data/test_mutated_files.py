"""Files that were damaged at random are read or refused in a line, whatever was done to them (see mutated_files.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.integration
def test_no_damaged_file_is_anything_but_read_or_refused(tmp_path) -> None:
    seed, count = os.environ.get("FLASHTRAIN_MUTATION_SEED", "1"), os.environ.get("FLASHTRAIN_MUTATIONS", "6")
    words = [sys.executable, str(Path(__file__).with_name("mutated_files.py")), str(tmp_path), seed, count]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-600:]}"
