"""Calls like one before (replay.py): replay_cases.py in Triton's interpreter, and how a compiled kernel is launched."""

import importlib.util
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from child_process import assert_passes_in_the_interpreter, compiled_rows

import flashtrain_kernels as fk
from flashtrain_kernels import replay
from flashtrain_kernels.replay import Place

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.interpreter
def test_replayed_passes_in_the_interpreter():
    assert_passes_in_the_interpreter("replay_cases.py")


class Driver:
    """The driver's function that launches, noting what it is given."""

    def __init__(self):
        self.given = []

    def __call__(self, *args):
        self.given.append(args)


@pytest.mark.parametrize("release", [(3, 6), (3, 7), (3, 8), (3, 9)])
def test_a_kernel_is_launched_with_the_new_addresses_in_the_order_of_its_release(release, monkeypatch):
    from triton.backends.nvidia import driver

    from flashtrain_kernels.backends import compiled

    monkeypatch.setattr(compiled, "release", lambda: release)
    given = 2 if release < (3, 8) else 3
    monkeypatch.setattr(
        driver, "make_tensordesc_arg", lambda *args: [("map", args[0].base.data_ptr(), args[1]), len(args) == given, 9]
    )
    launcher, tensordesc_indices, relevant_paths, tensordesc_meta = Driver(), {1}, {1: {}}, ["how"]

    def of_indices(*args):
        return launcher, tensordesc_indices, tensordesc_meta

    def of_paths(*args):
        return launcher, relevant_paths, tensordesc_meta

    inner = of_indices if release < (3, 8) else of_paths
    assert compiled.map_of(SimpleNamespace(base=torch.zeros(1)), "how")[1], "as many arguments as the release takes"
    run = SimpleNamespace(
        launch=inner, launch_cooperative_grid=False, launch_pdl=False, arg_annotations="notes", kernel_signature=b"s",
        global_scratch_size=0, profile_scratch_size=0,
    )  # fmt: skip
    kernel = SimpleNamespace(run=run, function=77, packed_metadata=(4, 1, 0))
    x, described = torch.zeros(4), SimpleNamespace(shape=[8, 2], strides=[2, 1])
    launch = SimpleNamespace(grid=(5,), args=(x, described, (3, 4), 1.5), constants={"C": "constant"})
    places = {id(x): Place(0, 0), id(described): Place(1, 64)}
    again = compiled.repeated(launch, kernel, lambda arg: places[id(arg)])
    own = [1000, ("map", 2064, "how"), 8, 2, 2, 1, (3, 4), 1.5, "constant"]
    again(11, [1000, 2000])
    start = (5, 1, 1, 11, 77, False, False)
    if release == (3, 6):
        assert launcher.given == [(*start, None, None, (4, 1, 0), None, None, None, *own)]
    else:
        assert launcher.given == [(*start, (4, 1, 0), None, None, None, None, None, "notes", b"s", own)]
    for name in ("global_scratch_size", "gsan_enabled"):
        setattr(run, name, 1)
        assert compiled.repeated(launch, kernel, lambda arg: places[id(arg)]) is None
        setattr(run, name, 0)


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
    signed = replay.signature([q, one, one])
    assert signed == replay.signature([q, other, other])
    assert signed != replay.signature([q, one, other])
