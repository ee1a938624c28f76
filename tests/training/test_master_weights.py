"""Half-precision weights with float32 copies, and several optimizers as one."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_training import TinyModel

from flashtrain.models.decoder import Decoder
from flashtrain.models.decoder_config import DecoderConfig
from flashtrain.models.layer_spec import layers_alike
from flashtrain.training import master_weights, optimizers
from flashtrain.training.master_weights import MasterWeights
from flashtrain.training.optimizers import adamw, inner_matrices, muon

TOKENS = torch.arange(36).view(4, 9) % 17
BUILDERS = {"adamw": adamw, "muon": muon}


def tiny_gpt2(tie=True):
    torch.manual_seed(0)
    config = DecoderConfig(17, 20, 9, 8, layers_alike(1, 8, 2, 2, 16), tie_embeddings=tie)
    return Decoder(config, attention="sdpa")


def steps(model, optimizer, count=5, start=0):
    for step in range(start, start + count):
        tokens = (TOKENS * (step + 1)) % 17
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_the_copies_follow_the_float32_course_and_the_weights_are_the_copies_rounded():
    model = TinyModel().bfloat16()
    optimizer = MasterWeights(adamw(model, lr=1e-2))
    exact = [p.detach().float().requires_grad_() for p in model.parameters()]
    plain = torch.optim.AdamW(exact, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    for _ in range(4):
        for parameter, wanted in zip(model.parameters(), exact, strict=True):
            parameter.grad = torch.randn_like(parameter)
            wanted.grad = parameter.grad.float()
        optimizer.step()
        plain.step()
    masters = {id(parameter): master for parameter, master in optimizer.pairs}
    for parameter, wanted in zip(model.parameters(), exact, strict=True):
        torch.testing.assert_close(masters[id(parameter)], wanted)
        assert torch.equal(parameter, masters[id(parameter)].bfloat16())


@pytest.mark.parametrize("name", BUILDERS)
def test_a_step_holds_a_part_of_the_gradients_in_float32_and_changes_nothing(name, monkeypatch):
    models = [tiny_gpt2().bfloat16() for _ in range(2)]
    # A float32 parameter among them, which is no copy, and a step must move once.
    for model in models:
        model.final_norm.float()
    whole, parts = (MasterWeights(BUILDERS[name](model, lr=1e-2)) for model in models)
    one, another = (model.loss(TOKENS[:, :-1], TOKENS[:, 1:]) for model in models)
    one.backward()
    another.backward()
    whole.step()
    held = []
    update = optimizers.SharedState._update

    def spied(optimizer):
        if optimizer is parts:
            held.append(
                sum(master.grad.numel() for _, master in parts.pairs if master.grad is not None)
            )
        update(optimizer)

    monkeypatch.setattr(master_weights, "GRADIENT_CHUNK", 300)
    monkeypatch.setattr(optimizers.SharedState, "_update", spied)
    parts.step()
    assert len(held) > 3
    assert max(held) <= 300
    assert sum(held) == sum(master.numel() for _, master in parts.pairs)
    for ours, wanted in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(ours, wanted)
        assert ours.grad is not None


def test_muon_trains_the_linear_layers_inside_and_adamw_the_rest():
    for tie in (True, False):
        model = tiny_gpt2(tie)
        chosen = {id(p) for p in inner_matrices(model)}
        assert chosen == {
            id(m.weight) for m in model.blocks.modules() if isinstance(m, torch.nn.Linear)
        }
        optimizer = muon(model, lr=1e-2)
        of_all = [id(p) for group in optimizer.param_groups for p in group["params"]]
        assert sorted(of_all) == sorted(id(p) for p in model.parameters())
        before = [p.clone() for p in model.parameters()]
        steps(model, optimizer, 1)
        assert all((a != b).any() for a, b in zip(before, model.parameters(), strict=True))


def test_a_schedule_reaches_every_group():
    optimizer = MasterWeights(muon(tiny_gpt2().bfloat16(), lr=1.0))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    schedule.step()
    inner = optimizer.optimizers[0]
    assert [group["lr"] for one in inner.optimizers for group in one.param_groups] == [
        0.5,
        0.5,
        0.5,
    ]


def test_muon_learns():
    model = tiny_gpt2()
    optimizer = muon(model, lr=1e-2)
    first = model.loss(TOKENS[:, :-1], TOKENS[:, 1:]).item()
    for _ in range(30):
        optimizer.zero_grad()
        model.loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
        optimizer.step()
    assert model.loss(TOKENS[:, :-1], TOKENS[:, 1:]).item() < 0.7 * first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_in_host_memory_change_nothing(dtype):
    models = [tiny_gpt2().to(dtype) for _ in range(3)]
    plain, host, again = models
    first = adamw(plain, lr=1e-2)
    optimizers = [MasterWeights(first) if dtype == torch.bfloat16 else first]
    optimizers += [MasterWeights(adamw(model, lr=1e-2), host=True) for model in (host, again)]
    for model, optimizer in zip(models[:2], optimizers[:2], strict=True):
        steps(model, optimizer)
    saved = copy.deepcopy(optimizers[1].state_dict())
    again.load_state_dict(host.state_dict())
    optimizers[2].load_state_dict(saved)
    assert not optimizers[2].state  # nothing for Lightning to move to the parameters' device
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(model, optimizer, start=5)
        assert all(
            torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
        )
    assert {master.device.type for _, master in optimizers[1].pairs} == {"cpu"}
