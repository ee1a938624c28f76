"""The Triton kernels without a GPU: computed in Triton's interpreter, and compiled ahead of time for three
generations."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


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


def test_the_kernels_equal_the_reference_in_the_interpreter():
    result = child(
        "-m", "pytest", "-p", "no:cacheprovider", "-x", str(HERE / "interpreter_cases.py"), TRITON_INTERPRET="1"
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


# Shared memory one block may use, in bytes.
@pytest.mark.parametrize(("capability", "shared_memory"), [(80, 166_912), (90, 232_448), (100, 232_448)])
def test_the_tables_tiles_compile_without_spilling_registers(capability, shared_memory):
    result = child(str(HERE / "compile_cases.py"), str(capability))
    assert result.returncode == 0, result.stderr[-4000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == 6
    assert [row for row in rows if row["spills"]] == []
    assert [row for row in rows if row["shared"] > shared_memory] == []
    if capability == 90:
        assert [row for row in rows if row["wgmma"] == 0] == []
