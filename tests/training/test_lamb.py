"""LAMB, against its algorithm written out one tensor at a time."""

from __future__ import annotations

import pytest
import torch
from tiny_training import TinyModel

from flashtrain.training import lamb as module
from flashtrain.training.lamb import Lamb, lamb


def slow_lamb(histories, weights, *, lr, betas, eps, decay, adapt):
    """You et al. 2020, algorithm 2, with bias correction, in the order in which it is printed."""
    weights = [w.clone() for w in weights]
    m, v = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    for step, gradients in enumerate(histories, start=1):
        for i, g in enumerate(gradients):
            m[i] = betas[0] * m[i] + (1 - betas[0]) * g
            v[i] = betas[1] * v[i] + (1 - betas[1]) * g**2
            corrected = (
                m[i] / (1 - betas[0] ** step) / ((v[i] / (1 - betas[1] ** step)).sqrt() + eps)
            )
            update = corrected + decay[i] * weights[i]
            ratio = 1.0
            if adapt[i] and weights[i].norm() > 0 and update.norm() > 0:
                ratio = weights[i].norm() / update.norm()
            weights[i] = weights[i] - lr * ratio * update
    return weights


@pytest.mark.parametrize("chunk", [1, 50, 2**26])
def test_it_is_the_algorithm_in_float64_however_many_tensors_are_updated_together(
    monkeypatch, chunk
):
    monkeypatch.setattr(module, "UPDATE_CHUNK", chunk)
    torch.manual_seed(0)
    model = TinyModel().double()
    before = [p.detach().clone() for p in model.parameters()]
    histories = [[torch.randn_like(p) * 0.1 for p in before] for _ in range(5)]
    optimizer = lamb(model, lr=0.02, weight_decay=0.1)
    for gradients in histories:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    matrix = [p.dim() >= 2 for p in before]
    exact = slow_lamb(
        histories,
        before,
        lr=0.02,
        betas=(0.9, 0.999),
        eps=1e-6,
        decay=[0.1 * m for m in matrix],
        adapt=matrix,
    )
    for ours, reference in zip(model.parameters(), exact, strict=True):
        torch.testing.assert_close(ours.detach(), reference, atol=1e-13, rtol=1e-12)


def test_weights_of_zero_and_gradients_of_zero_do_not_stop_it():
    weights = [torch.zeros(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)]
    optimizer = Lamb(weights, lr=0.1, weight_decay=0.0)
    weights[0].grad, weights[1].grad = torch.ones(2, 2), torch.zeros(2, 2)
    optimizer.step()
    torch.testing.assert_close(weights[0].detach(), torch.full((2, 2), -0.1), atol=1e-4, rtol=0)
    assert torch.equal(weights[1].detach(), torch.ones(2, 2))
