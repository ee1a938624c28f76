"""Feed-forwards of transformers' layers by pieces of tokens, where our own operator does not serve
them: adapters, other activations, experts."""

from __future__ import annotations

import huggingface_models as tiny
import pytest
import torch

from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
from flashtrain.integrations.huggingface_model import transformers_decoder
from flashtrain.models.activation_checkpointing import MemorySavings

TOKENS = 13
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def adapted(
    kind: str = "llama", dropout: float = 0.0, dtype: torch.dtype = torch.float64
) -> HuggingFaceDecoder:
    pytest.importorskip("peft")
    torch.manual_seed(0)
    model = transformers_decoder(
        config=kind, changes=tiny.LLAMA_LIKE, lora={**LORA, "lora_dropout": dropout}
    )
    model.materialise(torch.device("cpu"))
    for name, one in model.named_parameters():
        if ".lora_B" in name:
            one.data = 0.3 * torch.randn(one.shape)
    return model.to(dtype).train()


def step(
    model: HuggingFaceDecoder, tokens: int = TOKENS
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = tiny.tokens(1, tokens)
    model.zero_grad()
    loss = model.loss(ids, ids.roll(-1, 1))
    loss.backward()
    return loss.detach(), {
        name: one.grad for name, one in model.named_parameters() if one.grad is not None
    }


def assert_same(found, wanted, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_each_piece_is_computed_once_forward_and_once_more_for_its_backward(
    checkpointing: str,
) -> None:
    model = adapted()
    wanted = step(model)
    model.save_memory(MemorySavings(checkpointing, ffn_chunk=4))
    seen: list[int] = []
    model.blocks[0].mlp.act_fn.register_forward_hook(
        lambda module, given, made: seen.append(made.shape[-2])
    )
    assert_same(step(model), wanted)
    assert seen == [1, 4, 4, 4, 1, 4, 4, 4, 1]  # the first one looks at what the module gives


def dropping(kind: str) -> HuggingFaceDecoder:
    """A feed-forward that drops: adapters by a module, Starcoder2 and SeedOss by a function."""
    if kind == "adapters":
        return adapted(dropout=0.5)
    changes = {**tiny.LLAMA_LIKE, "residual_dropout": 0.5, "attention_dropout": 0.0}
    torch.manual_seed(0)
    model = transformers_decoder(config=kind, changes=changes)
    model.materialise(torch.device("cpu"))
    return model.double().train()


@pytest.mark.parametrize("kind", ["adapters", "starcoder2", "seed_oss"])
def test_dropout_drops_the_same_in_the_backward(kind: str) -> None:
    model, results = dropping(kind), []
    changed = {
        name: one for name, one in model.named_parameters() if one.requires_grad and ".mlp." in name
    }
    for checkpointing, shift in (("none", 0.0), ("full", 0.0), ("full", 1e-5)):
        model.save_memory(MemorySavings(checkpointing, ffn_chunk=4))
        for one in changed.values():
            one.data += shift
        torch.manual_seed(3)
        results.append(step(model))
    assert_same(results[1], results[0])
    slope = sum(float(results[0][1][name].sum()) for name in changed)
    assert float(results[2][0] - results[0][0]) / 1e-5 == pytest.approx(slope, rel=0.05)
    model.eval()
    torch.testing.assert_close(step(model)[0], step(model)[0], rtol=0, atol=0)


def test_what_is_asked_of_a_feed_forward_first_leaves_the_random_numbers_alone() -> None:
    drawn = []
    for chunk in (None, 4):
        model = adapted()
        model.save_memory(MemorySavings(ffn_chunk=chunk))
        torch.manual_seed(3)
        step(model)
        drawn.append(torch.rand(1))
    assert drawn[0] == drawn[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_what_is_compiled_does_not_grow_with_pieces_and_layers(kind: str) -> None:
    if kind == "llama":
        model = adapted()
    else:
        ours, _ = tiny.pair(kind, torch.float64)
        ours.set_experts_implementation("eager")
        model = HuggingFaceDecoder(ours).train()
    wanted = step(model)
    sizes = []
    for chunk in (7, 5):
        torch._dynamo.reset()
        compiled: list[int] = []

        def keep(graph, _, compiled=compiled):
            compiled.append(len(graph.graph.nodes))
            return graph.forward

        model.save_memory(MemorySavings("full", ffn_chunk=chunk))
        model.compile_blocks(dynamic=True, backend=keep)
        assert_same(step(model), wanted)
        sizes.append(sorted(compiled))
        for layer in model.layers:  # as they were
            layer.compute = type(layer.layer).forward.__get__(layer.layer)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_calls_of_several_lengths_have_their_gradients_together(
    dtype: torch.dtype, checkpointing: str
) -> None:
    """In float32 under autocast, which casts weights for each use, with their gradients."""
    model, results = adapted(dtype=dtype), []
    ids = tiny.tokens(1, TOKENS)
    for chunk in (None, 4):
        model.save_memory(MemorySavings(checkpointing, ffn_chunk=chunk))
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            long, short = model.loss(ids, ids.roll(-1, 1)), model.loss(ids[:, :3], ids[:, 1:4])
        (long + short).backward()
        found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        results.append((long.detach() + short.detach(), found))
    assert_same(results[1], results[0], 1e-10 if dtype == torch.float64 else 2e-2)


def test_frozen_weights_and_inputs_get_no_gradient_and_nothing_is_kept_without_any() -> None:
    model = adapted()
    model.save_memory(MemorySavings(ffn_chunk=4))
    ids = tiny.tokens(1, TOKENS)
    whole = model(ids)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), whole.detach())
    model.requires_grad_(False)
    assert not model(ids).requires_grad
