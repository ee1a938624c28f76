"""The Triton kernels without a GPU: computed in Triton's interpreter, and compiled ahead of time for three
generations."""

import importlib.util

import pytest
from child_process import assert_passes_in_the_interpreter, compiled_rows

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


# In parts, because together they are slow on a slow machine.
@pytest.mark.interpreter
@pytest.mark.parametrize("part", [pytest.param("every_two", marks=pytest.mark.slow), "every_feature", "not every"])
def test_the_kernels_equal_the_reference_in_the_interpreter(part):
    assert_passes_in_the_interpreter("interpreter_cases.py", "-k", part)


# Compiling all that is compiled for sm_90 takes two minutes of a core. For other GPUs .ci/run compiles them, with two
# releases of Triton and on days that take turns.
@pytest.mark.slow
def test_the_tables_tiles_compile_without_spills_within_shared_memory_and_with_tensor_cores():
    rows = compiled_rows("compile_cases.py", "90")
    assert [row for row in rows if row["faults"]] == []
    assert {row["kernel"] for row in rows} == {"forward", "dkdv", "dq", "rows", "both", "dbias"}
    assert all(row["wgmma"] for row in rows if row["kernel"] != "rows")
