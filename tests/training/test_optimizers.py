"""AdamW and its parameter groups."""

from __future__ import annotations

from tiny_training import TinyModel
from torch import nn

from flashtrain.training.optimizers import parameter_groups


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
