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

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


# Slow: it builds Triton's launcher, and compiles 17 kernels.
@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler")
def test_cuda_is_asked_for_the_same_launch_however_a_kernel_is_launched():
    rows = compiled_rows("launcher_cases.py")
    assert len(rows) == 21  # five of each of three calls, six at D = 256
    assert [row for row in rows if row["faults"]] == []


def test_hooks_that_watch_launches_are_found(monkeypatch):
    from triton import knobs

    from flashtrain_kernels.backends.compiled import Repeated

    assert not Repeated.watched()
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    assert Repeated.watched()


def test_without_a_c_compiler_triton_launches(monkeypatch, caplog):
    from flashtrain_kernels.backends import compiled

    def fails(*args, **options):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(compiled, "compile_module_from_src", fails)
    compiled.launcher.cache_clear()
    assert compiled.repeated([], [], lambda x: None, 0, (), 0) is None
    assert "Failed to find C compiler" in caplog.text
    compiled.launcher.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_call_like_the_one_before_costs_the_host_little(path):
    import time

    ours = [
        torch.randn(2, 256, 16, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    theirs = [each.detach().transpose(1, 2).requires_grad_() for each in ours]
    dout = torch.randn_like(ours[0])
    calls = {
        "ours": (ours, dout, lambda: fk.flash_attn_func(*ours, causal=True)),
        "torch": (
            theirs,
            dout.transpose(1, 2),
            lambda: F.scaled_dot_product_attention(*theirs, is_causal=True),
        ),
    }
    least = {}
    for _ in range(400):
        # in turns, as tests beside this one use the same cores.
        for name, (inputs, gradient, call) in calls.items():
            torch.cuda.synchronize()  # an empty queue: a full one would be waited for
            begun = time.perf_counter()
            out = call()
            between = time.perf_counter()
            torch.autograd.grad(out, inputs, gradient)
            for part, seconds in (
                ("forward", between - begun),
                ("backward", time.perf_counter() - between),
            ):
                least[name, part] = min(seconds, least.get((name, part), 1.0))
    assert least["ours", "forward"] <= 2 * least["torch", "forward"]
    assert least["ours", "backward"] <= 2 * least["torch", "backward"]


def test_the_signature_separates_one_cu_seqlens_from_two_as_hoppers_dropout_serves_only_one():
    q, one = torch.zeros(1, 8, 1, 64), torch.tensor([0, 8], dtype=torch.int32)
    other = one.clone()
    signed = launch_cache.signature([q, one, one])
    assert signed == launch_cache.signature([q, other, other])
    assert signed != launch_cache.signature([q, one, other])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_repeated_launches_go_to_the_current_stream_of_the_tensors_device():
    for number in range(torch.cuda.device_count()):
        q, k, v = (
            torch.randn(1, 128, 2, 64, device=f"cuda:{number}", dtype=torch.bfloat16)
            for _ in range(3)
        )
        wanted = fk.reference.attention(*[x.double() for x in (k, k, v)])
        for _ in range(3):
            fk.flash_attn_func(q, k, v)
        torch.cuda.synchronize(number)
        stream = torch.cuda.Stream(number)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            q.copy_(k)
            got = fk.flash_attn_func(q, k, v)
        stream.synchronize()
        torch.testing.assert_close(got.double(), wanted, atol=0.02, rtol=0.02)


def test_tensors_like_earlier_ones_have_the_signature_that_signing_gives():
    def forms():
        x, one, other = (
            torch.zeros(2, 8, 2, 8),
            torch.zeros(9, dtype=torch.int32),
            torch.zeros(9, dtype=torch.int32),
        )
        return [
            [x, x, x], [x, x.clone(), x], [x, x.clone(), x.clone()],
            [x.clone().requires_grad_(), x, x],
            [x.transpose(1, 2), x, x], [x.half(), x, x], [x[:1], x, x],
            [x.flatten()[1:17].view(1, 1, 2, 8), x, x],
            [x, one, one], [x, one, one.view(9)], [x, one, other], [x, one, one[:8]],
        ]  # fmt: skip

    wanted = []
    for tensors in forms():
        launch_cache._RECENT.clear()
        wanted.append(launch_cache.signature(tensors))
    assert len(set(wanted)) == 8  # the first four are alike, and so are the ninth and the tenth
    for earlier in forms():
        launch_cache._RECENT.clear()
        launch_cache.signature(earlier)
        assert [launch_cache.signature(tensors) for tensors in forms()] == wanted


def test_special_tensors_have_no_signature_after_plain_ones_either():
    x = torch.zeros(2, 8, 2, 8)
    for _ in range(2):
        assert launch_cache.signature([x, x, x]) is not None

    class Other(torch.Tensor):
        pass

    for special in (
        x.as_subclass(Other),
        torch._neg_view(x),
        x.to_sparse(),
        x.to("meta"),
        None,
        [x],
    ):
        assert launch_cache.signature([special, x, x]) is None
    seen = []
    torch.vmap(lambda each: (seen.append(launch_cache.signature([each, x, x])), each)[1])(x[None])
    assert seen == [None]
