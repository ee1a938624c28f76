"""The Triton kernels without a GPU: computed in Triton's interpreter, and compiled ahead of time for three
generations."""

import importlib.util

import pytest
from child_process import assert_passes_in_the_interpreter, compiled_rows

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


# In parts, because together they are slow on a slow machine. Slow: every two features together.
@pytest.mark.parametrize(
    "part", [pytest.param("every_two", marks=pytest.mark.slow), "every_feature or every_value", "not every"]
)
def test_the_kernels_equal_the_reference_in_the_interpreter(part):
    assert_passes_in_the_interpreter("interpreter_cases.py", "-k", part)


# All cases of the other two are compiled by .ci/run, beside those of other releases of Triton.
# Slow: compiling all that is compiled for sm_90 takes half a minute of a core. One of few cases is always compiled.
@pytest.mark.parametrize(
    ("capability", "cases"),
    [
        pytest.param(80, "few", marks=pytest.mark.slow),
        pytest.param(90, "tests", marks=pytest.mark.slow),
        (90, "few"),
        pytest.param(100, "few", marks=pytest.mark.slow),
    ],
)
def test_the_tables_tiles_compile_without_spills_within_shared_memory_and_with_tensor_cores(capability, cases):
    rows = compiled_rows("compile_cases.py", str(capability), "--cases", cases)
    assert [row for row in rows if row["faults"]] == []
    together = {"rows", "both"} if capability == 90 else set()
    assert {row["kernel"] for row in rows} == {"forward", "dkdv", "dq", "dbias"} | together
    assert all(row["wgmma"] for row in rows if row["kernel"] != "rows") == (capability == 90)


@pytest.mark.slow
def test_the_tables_tiles_fit_gpus_with_little_shared_memory():
    rows = compiled_rows("compile_cases.py", "86", "--cases", "small")
    assert [row for row in rows if row["faults"]] == []
    assert max(row["shared"] for row in rows) <= 99 * 1024
