"""The Triton kernels without a GPU: computed in Triton's interpreter, and
compiled ahead of time."""

import importlib.util
from collections import Counter

import pytest
from child_process import assert_passes_in_the_interpreter, compiled_rows

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


# The features in parts, because together they are slow on a slow machine. A
# process for what is quick.
@pytest.mark.longest
@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("files", "part"),
    [
        pytest.param("interpreter_cases", "every_two", marks=pytest.mark.slow),
        ("interpreter_cases", "not every_two"),
        (
            (
                "interpreter_hopper_cases interpreter_kvcache_cases interpreter_packed_cases "
                "interpreter_small_cases interpreter_adamw_cases"
            ),
            "",
        ),
        ("launch_cache_cases", ""),
    ],
)
def test_the_kernels_are_right_in_the_interpreter(files, part):
    assert_passes_in_the_interpreter(files, part)


# Compiling all that is compiled for sm_90 takes two minutes of a core. For other GPUs .ci/run
# compiles them, with two releases of Triton and on days that take turns.
@pytest.mark.longest
@pytest.mark.slow
def test_the_tables_tiles_compile_without_spills_within_shared_memory_and_with_tensor_cores():
    rows = compiled_rows("compile_cases.py", "90")
    assert [row for row in rows if row["faults"]] == []
    apart = {"dk", "dv"}  # a launch each for heads beyond 256
    assert {row["kernel"] for row in rows} == apart | {
        "forward", "dkdv", "dq", "rows", "both", "dbias",
    }  # fmt: skip
    assert all(row["wgmma"] for row in rows if row["kernel"] != "rows")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_small_kernels_compile_without_spills_within_any_gpus_shared_memory(capability):
    rows = compiled_rows("small_compile_cases.py", str(capability))
    assert Counter(row["kernel"] for row in rows) == {
        "plans": 6,
        "masks": 18,
        "losses": 4,
        "merging": 4,
        "caches": 15,
        "updates": 4,
    }
    limit = dict.fromkeys(("plans", "masks", "losses", "merging", "updates"), 48 * 1024)
    limit["caches"] = 101_376
    assert [row for row in rows if row["spills"] or row["shared"] > limit[row["kernel"]]] == []
