"""Runs Python in a process of its own: Triton decides once a process whether to interpret,
and a compile may abort."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def child(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(
        [str(HERE), str(HERE.parents[1] / "kernels"), os.environ.get("PYTHONPATH", "")]
    )
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def assert_passes_in_the_interpreter(files: str, part: str) -> None:
    """Run files of this folder, all at once or a part (pytest's -k) of them, by pytest
    with TRITON_INTERPRET=1."""
    command = ("-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-x", "-k", part)
    result = child(
        *command, *(str(HERE / f"{name}.py") for name in files.split()), TRITON_INTERPRET="1"
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


def compiled_rows(program: str, *arguments: str) -> list[dict[str, Any]]:
    """The rows of JSON that a program of this folder prints, which compiles kernels."""
    result = child(str(HERE / program), *arguments)
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line) for line in result.stdout.splitlines()]
