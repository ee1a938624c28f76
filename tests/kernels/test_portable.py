"""The Triton kernels without a GPU: computed in Triton's interpreter, and compiled ahead of time for three
generations."""

import importlib.util
import json
from typing import Any

import pytest
from child_process import HERE, child

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


# Two parts, because together they are slow on a slow machine.
@pytest.mark.parametrize("part", ["every_feature", "not every_feature"])
def test_the_kernels_equal_the_reference_in_the_interpreter(part):
    cases = str(HERE / "interpreter_cases.py")
    result = child("-m", "pytest", "-p", "no:cacheprovider", "-x", cases, "-k", part, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


def compiled(capability: int, cases: str) -> list[dict[str, Any]]:
    result = child(str(HERE / "compile_cases.py"), str(capability), "--cases", cases)
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_tables_tiles_compile_without_spills_within_shared_memory_and_with_tensor_cores(capability):
    rows = compiled(capability, "tests")
    assert [row for row in rows if row["faults"]] == []
    together = {"rows", "both"} if capability == 90 else set()
    assert {row["kernel"] for row in rows} == {"forward", "dkdv", "dq", "dbias"} | together
    assert all(row["wgmma"] for row in rows if row["kernel"] != "rows") == (capability == 90)
    # Every feature at once has no tile of its own: it spills, within reason.
    assert max(row["spills"] for row in rows) < 1500


def test_the_tables_tiles_fit_gpus_with_little_shared_memory():
    rows = compiled(86, "small")
    assert [row for row in rows if row["faults"]] == []
    assert max(row["shared"] for row in rows) <= 99 * 1024
