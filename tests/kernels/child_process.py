"""Runs Python in a process of its own: Triton decides once a process whether to interpret, and a compile may abort."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def child(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(HERE), str(HERE.parents[1] / "kernels"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
