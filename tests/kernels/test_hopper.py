"""The Gluon kernels without a GPU: they compile for sm_90 as they should. All of them, and with Triton 3.6: .ci/run."""

import json

import pytest
from child_process import HERE, child


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_they_compile_with_wgmma_and_tma_and_without_spills_or_serialised_products(direction):
    result = child(str(HERE / f"hopper_{direction}_cases.py"), "causal", "intervals")
    assert result.returncode == 0, result.stderr[-4000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert {row["head_dim"] for row in rows} >= {64, 128}
    assert [row for row in rows if row["faults"]] == []
