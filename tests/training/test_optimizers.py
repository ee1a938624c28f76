"""AdamW and its parameter groups."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_training import TinyModel
from torch import nn

from flashtrain.training.gradient_clipping import clip_gradients
from flashtrain.training.master_weights import MasterWeights
from flashtrain.training.optimizers import adamw, parameter_groups


def test_matrices_decay_and_vectors_do_not():
    model = TinyModel()
    decayed, plain = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() >= 2 for p in decayed["params"])
    assert all(p.dim() < 2 for p in plain["params"])
    assert any(p is model.embedding.weight for p in decayed["params"])


def test_every_trained_parameter_is_in_exactly_one_group_also_when_tied():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    model[1].weight = model[0].weight
    ids = [id(p) for group in parameter_groups(model, 0.1) for p in group["params"]]
    assert sorted(ids) == sorted({id(p) for p in model.parameters()})


def test_frozen_parameters_are_left_out():
    model = TinyModel()
    model.embedding.requires_grad_(False)
    assert all(
        p is not model.embedding.weight
        for group in parameter_groups(model, 0.1)
        for p in group["params"]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_adamw_is_torchs_and_gradients_are_clipped_in_place(dtype):
    model = TinyModel().to(dtype)
    other = copy.deepcopy(model)
    options = {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}
    theirs = torch.optim.AdamW(parameter_groups(other, 0.1), **options)
    optimizers = [adamw(model), theirs]
    if dtype == torch.bfloat16:
        optimizers = [MasterWeights(one) for one in optimizers]
    for _ in range(3):
        for one, twin in zip(model.parameters(), other.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            twin.grad = one.grad.clone()
        clip_gradients(model, 0.1, optimizer=optimizers[0])
        clip_gradients(other, 0.1)
        for one, twin in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one.grad, twin.grad)
        for optimizer in optimizers:
            optimizer.step()
    for one, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, twin)
    saved, wanted = (optimizer.state_dict() for optimizer in optimizers)
    assert saved["param_groups"] == wanted["param_groups"]
    assert saved["state"][0].keys() == wanted["state"][0].keys()
