"""Clipping by the norm over all gradients."""

from __future__ import annotations

import pytest
import torch
from tiny_training import TinyData, TinyModel, TinyTask, tiny_trainer

from flashtrain.training.gradient_clipping import clip_gradients, gradient_scale


def with_gradients(factor=1.0):
    torch.manual_seed(0)
    model = TinyModel()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * factor
    return model


def norm_of(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()]).norm()


def test_the_norm_before_clipping_is_returned_and_the_one_after_is_the_limit():
    model = with_gradients()
    before = norm_of(model)
    assert clip_gradients(TinyModel(), 1.0) == 0  # without gradients
    assert clip_gradients(model, 1.0) == pytest.approx(before.item())
    assert norm_of(model) == pytest.approx(1.0, rel=1e-5)


def test_small_gradients_and_no_limit_change_nothing():
    for limit in (1e9, None, 0.0, float("inf")):
        model = with_gradients()
        before = [p.grad.clone() for p in model.parameters()]
        clip_gradients(model, limit)
        assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))


def test_loss_scaled_gradients_are_clipped_as_if_they_were_not_scaled():
    plain, scaled = with_gradients(), with_gradients(1024.0)
    norm = clip_gradients(plain, 0.5)
    assert clip_gradients(scaled, 0.5, scale=torch.tensor(1024.0)) == pytest.approx(
        norm.item(), rel=1e-6
    )
    for one, other in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(one.grad * 1024, other.grad)


def test_a_nan_is_not_hidden():
    model = with_gradients()
    model.norm.weight.grad[0] = float("nan")
    assert torch.isnan(clip_gradients(model, 1.0))


def test_a_trainers_clip_value_works_with_fused_adamw_under_bf16(tmp_path):
    trainer = tiny_trainer(tmp_path, precision="bf16-mixed", gradient_clip_val=0.5, max_steps=2)
    trainer.fit(TinyTask(), datamodule=TinyData())
    assert trainer.callback_metrics["gradient_norm"] > 0


def test_only_a_fused_optimizer_under_loss_scaling_still_carries_the_scale():
    class Plugin:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    class TrainerStub:
        precision_plugin = Plugin()

    Plugin.scaler.scale(torch.ones(1))  # the scale's tensor is made on first use
    weights = [torch.zeros(1, requires_grad=True)]
    assert float(gradient_scale(TrainerStub(), torch.optim.AdamW(weights, fused=True))) == 8.0
    assert float(gradient_scale(TrainerStub(), torch.optim.AdamW(weights, fused=False))) == 1.0
    Plugin.scaler = None
    assert float(gradient_scale(TrainerStub(), torch.optim.AdamW(weights, fused=True))) == 1.0
