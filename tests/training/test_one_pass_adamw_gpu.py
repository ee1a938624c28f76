"""AdamW's step in one pass on a GPU, beside torch's fused AdamW as it was: gradients clipped in
place, copied to float32, and the copies rounded."""

from __future__ import annotations

import copy

import pytest
import torch

from flashtrain.training.gradient_clipping import clip_gradients
from flashtrain.training.master_weights import MasterWeights
from flashtrain.training.one_pass_adamw import HALF, OnePassAdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Matrices, a norm, sizes that no vector divides, more than a program takes.
SHAPES = ((512, 2048), (2048, 512), (2048,), (50_257, 8), (7, 3), (1,), (16_384 * 3 + 1,))
RATES = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8}
DTYPES = [*HALF, torch.float32]


def parameters(dtype):
    torch.manual_seed(0)
    drawn = [torch.randn(*shape, device="cuda") / 50 for shape in SHAPES]
    return torch.nn.ParameterList([torch.nn.Parameter(one.to(dtype)) for one in drawn])


def optimizer_of(model, kind):
    decayed = [one for one in model if one.dim() > 1]
    others = [one for one in model if one.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = kind(groups, **RATES, fused=True)
    return MasterWeights(optimizer) if model[0].dtype in HALF else optimizer


def draw(*models):
    for alike in zip(*models, strict=True):
        gradient = (torch.randn(alike[0].shape, device="cuda") / 30).to(alike[0].dtype)
        for one in alike:
            one.grad = gradient.to(one.dtype, copy=True)


def tensors(optimizer):
    state = optimizer.state_dict()
    return [x for one in state["state"].values() for x in one.values()] + state.get("masters", [])


def assert_same(ours, theirs):
    for got, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(got, wanted), (got.double() - wanted.double()).abs().max()


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_scaling_weights_copies_and_moments_are_torchs_bit_for_bit(dtype, clipped):
    model = parameters(dtype)
    other = copy.deepcopy(model)
    ours, theirs = optimizer_of(model, OnePassAdamW), optimizer_of(other, torch.optim.AdamW)
    for _ in range(20):
        draw(model, other)
        if clipped:  # by a factor of 1
            clip_gradients(model, 1e9, optimizer=ours)
        ours.step()
        theirs.step()
    assert_same(tensors(ours), tensors(theirs))
    assert_same(model, other)


def error(got, wanted):
    return ((got.double() - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_clipped_steps_are_nearer_to_float64_than_those_that_clip_in_place(dtype):
    model = parameters(dtype)
    other, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    ours, theirs = optimizer_of(model, OnePassAdamW), optimizer_of(other, torch.optim.AdamW)
    wanted = optimizer_of(exact, torch.optim.AdamW)
    for _ in range(3):
        draw(model, other, exact)
        norm = clip_gradients(exact, 0.3)
        got = clip_gradients(model, 0.3, optimizer=ours)
        torch.testing.assert_close(got, norm, rtol=1e-5, atol=0)
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.3)
        for one in (ours, theirs, wanted):
            one.step()
    for number, state in wanted.state_dict()["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            of_ours, of_theirs = (
                error(one.state_dict()["state"][number][name], state[name])
                for one in (ours, theirs)
            )
            assert of_ours <= 5e-6  # betas are float32, as torch's
            assert dtype == torch.float32 or of_ours < of_theirs / 10
    copies, others = (
        [one for group in optimizer.param_groups for one in group["params"]]
        for optimizer in (ours, theirs)
    )
    trained = [one for group in wanted.param_groups for one in group["params"]]
    for got, before, one in zip(copies, others, trained, strict=True):
        assert error(got, one) <= max(error(before, one), 2e-6)


def test_neither_clipping_nor_a_step_waits_for_the_device_or_holds_gradients_in_float32():
    model = parameters(torch.bfloat16)
    ours = optimizer_of(model, OnePassAdamW)
    draw(model)
    ours.step()  # makes the states
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        clip_gradients(model, 0.5, optimizer=ours)
        ours.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (
        torch.cuda.max_memory_allocated() - before < 2**20
    )  # a float32 gradient takes four times that


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpoint_of_torchs_continues_bit_for_bit(dtype):
    model = parameters(dtype)
    theirs = optimizer_of(model, torch.optim.AdamW)
    draw(model)
    theirs.step()
    again = copy.deepcopy(model)
    ours = optimizer_of(again, OnePassAdamW)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for _ in range(3):
        draw(model, again)
        theirs.step()
        ours.step()
    assert_same(tensors(ours), tensors(theirs))
    assert_same(again, model)


def test_under_fp16s_loss_scaling_a_step_is_torchs():
    model = parameters(torch.float32)
    other = copy.deepcopy(model)
    for one, kind in ((model, OnePassAdamW), (other, torch.optim.AdamW)):
        torch.manual_seed(1)
        scaler, optimizer = torch.amp.GradScaler("cuda", init_scale=8.0), optimizer_of(one, kind)
        scaler.scale(torch.ones(1, device="cuda"))  # the scale's tensor is made on first use
        draw(one)
        clip_gradients(one, 0.5, scaler._scale, optimizer=optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert_same(model, other)
