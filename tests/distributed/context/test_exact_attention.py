"""Attention over four gloo ranks is one process's, in float64: outputs, dQ, dK and dV,
every method and mask."""

from __future__ import annotations

import pytest
from attention_ranks import METHODS, cases

EXACT = 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_every_case_is_exact_on_every_rank(four, method):
    wrong = [
        f"{case}: rank {rank}: {what} is off by {error:.1e}"
        for case in cases()
        if case.method == method
        for rank, of_rank in enumerate(four["attention"])
        for what, error in of_rank[str(case)].items()
        if not error <= EXACT  # NaN is wrong too
    ]
    assert not wrong, "\n".join(wrong)
