"""How a compiled kernel is launched."""

import importlib.util
import os
import shutil

import pytest
import torch
import torch.nn.functional as F
from child_process import compiled_rows

import flashtrain_kernels as fk
from flashtrain_kernels import launch_cache

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


# Slow: it builds Triton's launcher, and compiles eight kernels.
@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler")
def test_cuda_is_asked_for_the_same_launch_however_a_kernel_is_launched():
    rows = compiled_rows("launcher_cases.py")
    assert len(rows) == 12  # four more with a softcap
    assert [row for row in rows if row["faults"]] == []


def test_hooks_that_watch_launches_are_found(monkeypatch):
    from triton import knobs

    from flashtrain_kernels.backends.compiled import Repeated

    assert not Repeated.watched()
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    assert Repeated.watched()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_call_like_the_one_before_costs_the_host_little(path):
    import time

    ours = [torch.randn(2, 256, 16, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    theirs = [each.detach().transpose(1, 2).requires_grad_() for each in ours]
    dout = torch.randn_like(ours[0])
    calls = {
        "ours": (ours, dout, lambda: fk.flash_attn_func(*ours, causal=True)),
        "torch": (theirs, dout.transpose(1, 2), lambda: F.scaled_dot_product_attention(*theirs, is_causal=True)),
    }
    least = {}
    for _ in range(400):
        for name, (inputs, gradient, call) in calls.items():  # in turns, as tests beside this one use the same cores
            torch.cuda.synchronize()  # an empty queue: a full one would be waited for
            begun = time.perf_counter()
            out = call()
            between = time.perf_counter()
            torch.autograd.grad(out, inputs, gradient)
            for part, seconds in (("forward", between - begun), ("backward", time.perf_counter() - between)):
                least[name, part] = min(seconds, least.get((name, part), 1.0))
    assert least["ours", "forward"] <= 2 * least["torch", "forward"]
    assert least["ours", "backward"] <= 2 * least["torch", "backward"]


def test_the_signature_tells_one_cu_seqlens_from_two_as_hoppers_dropout_serves_the_first_alone():
    q, one = torch.zeros(1, 8, 1, 64), torch.tensor([0, 8], dtype=torch.int32)
    other = one.clone()
    signed = launch_cache.signature([q, one, one])
    assert signed == launch_cache.signature([q, other, other])
    assert signed != launch_cache.signature([q, one, other])
