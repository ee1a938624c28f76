"""The Gluon kernels without a GPU: they compile for sm_90 as they should. All of them, and
with Triton 3.6: .ci/run."""

import importlib.util

import pytest
from child_process import compiled_rows

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


IN_TURN = ("deterministic", "deterministic window", "deterministic packed")


# Slow: ptxas takes some thirty seconds of a core for each direction.
@pytest.mark.longest
@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_they_compile_with_wgmma_and_tma_and_without_spills_or_serialised_products(direction):
    rows = compiled_rows(
        f"hopper_{direction}_cases.py", "causal", "intervals", "packed", "packed full",
        "packed window", "softcap",
        *(["padded", *IN_TURN] if direction == "backward" else []),
    )  # fmt: skip
    assert {row["head_dim"] for row in rows} >= {64, 128}
    assert [row for row in rows if row["faults"]] == []
    if direction == "backward":
        kinds = {(row["head_dim"], row["whole"], row["late"]) for row in rows}
        assert kinds == {
            (64, False, False), (64, True, False), (128, False, False), (128, False, True),
            (256, False, False),
            (72, False, True), (96, False, True), (200, False, False),
        }  # fmt: skip
