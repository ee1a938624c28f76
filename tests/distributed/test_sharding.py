"""Sharding a model in place (one rank; two ranks are in test_strategies.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tiny_training import TinyModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from flashtrain.distributed.sharding import shard
from flashtrain.errors import UserError
from flashtrain.models import GPT2, GPT2Config, MemorySavings
from flashtrain.training.gradient_clipping import clip_gradients


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    dist.destroy_process_group()


def decoder(savings: MemorySavings) -> GPT2:
    torch.manual_seed(0)
    config = GPT2Config.of_size("demo", "llama", vocab_size=17, context=16, dropout=0.2)
    model = GPT2(replace(config, layers=2, embed=32, ffn=48), attention="sdpa").double()
    model.save_memory(savings)
    return model


def gradients(model, loss):
    torch.manual_seed(1)
    loss(tokens(), tokens()).backward()
    return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]


SAVINGS = [MemorySavings("selective"), MemorySavings("full", offload=True, ffn_chunk=7)]


@pytest.mark.parametrize("savings", SAVINGS)
def test_checkpointed_blocks_are_computed_again_under_fsdp2(mesh, savings):
    plain, sharded = decoder(MemorySavings()), decoder(savings)
    shard(sharded, mesh)
    for ours, exact in zip(gradients(sharded, sharded.loss), gradients(plain, plain.loss), strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-11, rtol=0)


class LossOf(torch.nn.Module):
    """The loss as a forward, which is what DDP wraps."""

    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch):
        return self.model.loss(*batch)


@pytest.mark.parametrize("savings", SAVINGS)
def test_checkpointed_blocks_are_computed_again_under_ddp(mesh, savings):
    plain, wrapped = decoder(MemorySavings()), DistributedDataParallel(LossOf(decoder(savings)))
    for ours, exact in zip(gradients(wrapped, wrapped), gradients(plain, plain.loss), strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-11, rtol=0)


def tokens():
    return torch.arange(36).view(4, 9) % 17


def test_blocks_and_the_rest_are_sharded_and_the_loss_method_works(mesh):
    torch.manual_seed(0)
    plain = TinyModel()
    torch.manual_seed(0)
    sharded = TinyModel()
    shard(sharded, mesh)
    assert isinstance(sharded, FSDPModule)
    assert all(isinstance(block, FSDPModule) for block in sharded.blocks)
    assert torch.equal(sharded.loss(tokens()), plain.loss(tokens()))


def test_gradients_of_a_sharded_model_are_clipped_by_the_same_norm(mesh):
    norms = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model = TinyModel()
        if is_sharded:
            shard(model, mesh)
        model.loss(tokens()).backward()
        norm = clip_gradients(model, 0.1)
        norms.append((norm.item(), clip_gradients(model, None).item()))
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    assert norms[1][1] == pytest.approx(0.1, rel=1e-4)


def test_mixed_precision_computes_in_bf16_and_keeps_float32_weights_and_gradients(mesh):
    model = TinyModel()
    shard(model, mesh, precision="bf16-mixed")
    assert model(tokens()).dtype == torch.bfloat16
    model.loss(tokens()).backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_module_without_blocks_must_say_what_to_shard(mesh):
    with pytest.raises(UserError, match="no attribute 'blocks'"):
        shard(torch.nn.Linear(2, 2), mesh)
    shard(torch.nn.Linear(2, 2), mesh, blocks=[])
