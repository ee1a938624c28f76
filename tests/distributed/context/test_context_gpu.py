"""On two GPUs, through NCCL and our kernels: errors in bfloat16 are at most twice one GPU's."""

from __future__ import annotations

import json

import pytest
import torch
from ranks import run_script

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_errors_on_two_gpus_are_at_most_twice_one_gpus(tmp_path):
    code, printed = run_script("gpu_ranks.py", tmp_path)
    assert code == 0, printed[-6000:]
    wrong = []
    for rank in range(2):
        for case, error in json.loads((tmp_path / f"{rank}.json").read_text()).items():
            for what, ours, one in zip(("out", "dq", "dk", "dv"), error["ours"], error["one"], strict=True):
                if not ours <= 2 * one + 1e-5:
                    wrong.append(f"rank {rank}: {case}: {what} is off by {ours:.2e}, one GPU's by {one:.2e}")
    assert not wrong, "\n".join(wrong)
