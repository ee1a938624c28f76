"""Attention over four gloo ranks is one process's, in float64: outputs, dQ, dK and dV, every way and mask.

All cases run in one launch of four processes (attention_ranks.py); here each is judged on its own.
"""

from __future__ import annotations

import pytest
from attention_ranks import cases
from ranks import run

EXACT = 1e-12


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run("attention_ranks.py", 4, tmp_path_factory.mktemp("attention"))


@pytest.mark.xdist_group("context attention")
def test_every_case_is_exact_on_every_rank(found):
    wrong = [
        f"{case}: rank {rank}: {what} is off by {error:.1e}"
        for case in map(str, cases())
        for rank, of_rank in enumerate(found)
        for what, error in of_rank[case].items()
        if not error <= EXACT  # NaN is wrong too
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.xdist_group("context attention")
def test_a_drawn_dropout_seed_is_the_first_ranks(found):
    assert all(of_rank["drawn seeds agree"] for of_rank in found)
