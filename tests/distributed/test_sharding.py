"""Sharding a model in place (one rank; two ranks are in test_strategies.py)."""

from __future__ import annotations

import copy
from functools import partial

import hybrid_models
import pytest
import torch
import torch.distributed as dist
from tiny_training import TinyModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from flashtrain.distributed.sharding import groups_of, shard
from flashtrain.errors import UserError
from flashtrain.integrations.huggingface_attention import register_with_transformers
from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
from flashtrain.models import Decoder, DecoderConfig, MemorySavings
from flashtrain.models.trainable import as_trainable
from flashtrain.tasks import LanguageModel
from flashtrain.training.gradient_clipping import clip_gradients


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    dist.destroy_process_group()


def decoder(savings: MemorySavings) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig.of_size("demo", "llama", vocab_size=17, context=16, dropout=0.2)
    model = Decoder(config.changed(layers=2, embed=32, ffn=48), attention="sdpa").double()
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
    for ours, exact in zip(
        gradients(sharded, sharded.loss), gradients(plain, plain.loss), strict=True
    ):
        torch.testing.assert_close(ours, exact, atol=1e-11, rtol=0)


class LossOf(torch.nn.Module):
    """The loss as a forward, which is what DDP wraps."""

    def __init__(self, model: Decoder) -> None:
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


@pytest.mark.parametrize(
    ("group_bytes", "groups"),
    [
        (0, [[0], [1], [2], [3], [4]]),
        (400, [[0], [1], [2], [3], [4]]),
        (401, [[0, 1], [2, 3], [4]]),
        (2001, []),
    ],
)
def test_small_blocks_are_gathered_in_groups_and_a_small_model_whole(group_bytes, groups):
    # 400 bytes each.
    module = torch.nn.Sequential(*[torch.nn.Linear(10, 10, bias=False) for _ in range(5)])
    numbers = {block: number for number, block in enumerate(module)}
    found = groups_of(module, module, None, group_bytes)
    assert [[numbers[block] for block in group] for group in found] == groups


def of_transformers(savings: MemorySavings) -> HuggingFaceDecoder:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
    )
    config._attn_implementation = register_with_transformers()
    model = HuggingFaceDecoder(transformers.LlamaForCausalLM(config).double()).train()
    model.save_memory(savings)
    return model


@pytest.mark.slow  # compiles
def test_compiled_layers_that_compute_parts_again_train_under_ddp(mesh):
    plain, compiled = of_transformers(MemorySavings()), of_transformers(MemorySavings("selective"))
    LanguageModel(compiled, compile=True).configure_model()
    wrapped = DistributedDataParallel(LossOf(compiled))
    for ours, exact in zip(gradients(wrapped, wrapped), gradients(plain, plain.loss), strict=True):
        # transformers' norms are in float32.
        torch.testing.assert_close(ours, exact, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "savings", [MemorySavings(), MemorySavings("selective"), MemorySavings("full")]
)
def test_layers_gathered_in_groups_have_the_same_gradients_step_after_step(mesh, savings):
    plain, sharded = of_transformers(MemorySavings()), of_transformers(savings)
    shard(sharded, mesh, group_bytes=2 * 8 * sum(x.numel() for x in plain.blocks[0].parameters()))
    assert all(isinstance(block, FSDPModule) for block in sharded.blocks)
    for _ in range(3):
        for ours, exact in zip(
            gradients(sharded, sharded.loss), gradients(plain, plain.loss), strict=True
        ):
            torch.testing.assert_close(ours, exact, atol=1e-11, rtol=0)


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


@pytest.mark.parametrize("kind", ["qwen3_5_text", "kimi_linear", "bamba", "jamba"])
def test_mixed_precision_does_not_round_the_decays_of_a_recurrence(mesh, kind):
    model, seen = hybrid_models.decoder(kind, torch.float32), []
    owner = next(
        one for one in model.modules() if "A_log" in dict(one.named_parameters(recurse=False))
    )
    exact = owner.A_log.detach().clone()
    shard(model, mesh, "bf16-mixed")
    owner.register_forward_pre_hook(lambda *_: seen.append(owner.A_log.detach().clone()))
    with torch.autocast("cpu", torch.bfloat16):
        model.loss(tokens(), tokens(), positions=torch.arange(9).expand(4, 9)).backward()
    assert torch.equal(seen[0], exact)
    assert owner.A_log.grad.dtype == torch.float32


def test_mixed_precision_computes_in_bf16_and_keeps_float32_weights_and_gradients(mesh):
    model = TinyModel()
    shard(model, mesh, precision="bf16-mixed")
    assert model(tokens()).dtype == torch.bfloat16
    model.loss(tokens()).backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


def summed(method, *given):
    return method(*given).sum()


class Preferring(Decoder):
    """A decoder with a method of its own, which a task calls in place of the loss."""

    forward_methods = ("loss", "preference")

    def preference(self, tokens, labels):
        return self.token_losses(tokens, labels).square().mean() + self.output_weight.mean()


class Wrapped(torch.nn.Module):
    """Someone's own module, whose forward gives logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(17, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens):
        return torch.nn.functional.linear(
            self.blocks[1](self.blocks[0](self.embedding(tokens))), self.embedding.weight
        )


def test_every_method_that_a_model_names_computes_with_whole_weights(mesh):
    torch.manual_seed(0)
    config = DecoderConfig.of_size("demo", "llama", vocab_size=17, context=16).changed(layers=2)
    plain, sharded = (Preferring(config, attention="sdpa").double() for _ in range(2))
    sharded.load_state_dict(plain.state_dict())
    shard(sharded, mesh)
    for method in ("preference", "token_losses", "loss"):
        whole, ours = (partial(summed, getattr(one, method)) for one in (plain, sharded))
        for one, exact in zip(gradients(sharded, ours), gradients(plain, whole), strict=True):
            torch.testing.assert_close(one, exact, atol=1e-11, rtol=0)
        plain.zero_grad(), sharded.zero_grad()


def test_the_blocks_of_a_module_whose_forward_gives_logits_are_found(mesh):
    plain = as_trainable(Wrapped())
    sharded = as_trainable(copy.deepcopy(plain.module))
    shard(sharded, mesh)
    assert all(isinstance(block, FSDPModule) for block in sharded.module.blocks)
    assert torch.equal(sharded.loss(tokens(), tokens()), plain.loss(tokens(), tokens()))


def test_a_module_without_blocks_must_say_what_to_shard(mesh):
    with pytest.raises(UserError, match="no attribute 'blocks'"):
        shard(torch.nn.Linear(2, 2), mesh)
    shard(torch.nn.Linear(2, 2), mesh, blocks=[])
