"""Feed-forwards of transformers' layers by pieces of tokens, where our own operator does not serve them: adapters,
other activations, experts."""

from __future__ import annotations

import huggingface_models as tiny
import pytest
import torch

from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
from flashtrain.integrations.huggingface_model import transformers_decoder
from flashtrain.models.memory_savings import MemorySavings

TOKENS = 13
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def adapted(kind: str = "llama", dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> HuggingFaceDecoder:
    pytest.importorskip("peft")
    changes = {**tiny._LLAMA_LIKE, "eos_token_id": 1}
    torch.manual_seed(0)
    model = transformers_decoder(config=kind, changes=changes, lora={**LORA, "lora_dropout": dropout})
    model.materialise(torch.device("cpu"))
    for name, one in model.named_parameters():
        if ".lora_B" in name:
            one.data = 0.3 * torch.randn(one.shape)
    return model.to(dtype).train()


def step(model: HuggingFaceDecoder, tokens: int = TOKENS) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = tiny.tokens(1, tokens)
    model.zero_grad()
    loss = model.loss(ids, ids.roll(-1, 1))
    loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def assert_same(found, wanted, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=tolerance)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_each_piece_is_computed_once_forward_and_once_more_for_its_backward(checkpointing: str) -> None:
    model = adapted()
    wanted = step(model)
    model.save_memory(MemorySavings(checkpointing, ffn_chunk=4))
    seen: list[int] = []
    model.blocks[0].mlp.act_fn.register_forward_hook(lambda module, given, made: seen.append(made.shape[-2]))
    assert_same(step(model), wanted)
    assert seen == [1, 4, 4, 4, 1, 4, 4, 4, 1]  # the first one looks at what the module gives


def test_dropout_drops_the_same_in_the_backward() -> None:
    model = adapted(dropout=0.5)
    results = []
    for checkpointing, shift in (("none", 0.0), ("full", 0.0), ("full", 1e-5)):
        model.save_memory(MemorySavings(checkpointing, ffn_chunk=4))
        for name, one in model.named_parameters():
            one.data += shift * (".lora_B" in name)
        torch.manual_seed(3)
        results.append(step(model))
    assert_same(results[1], results[0])
    slope = sum(float(gradient.sum()) for name, gradient in results[0][1].items() if ".lora_B" in name)
    assert float(results[2][0] - results[0][0]) / 1e-5 == pytest.approx(slope, rel=0.05)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_oss"])
def test_what_is_compiled_does_not_grow_with_pieces_and_layers(kind: str) -> None:
    if kind == "llama":
        model = adapted()
    else:
        ours, _ = tiny.pair(kind, torch.float64)
        if kind == "gpt_oss":
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


def test_autocast_casts_weights_for_each_use_with_their_gradients() -> None:
    model = adapted(dtype=torch.float32)
    ids, results = tiny.tokens(1, TOKENS), []
    for chunk in (None, 4):
        model.save_memory(MemorySavings("none", ffn_chunk=chunk))
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):  # the second is short enough to be taken whole
            loss = model.loss(ids, ids.roll(-1, 1)) + model.loss(ids[:, :3], ids[:, 1:4])
        loss.backward()
        results.append((loss.detach(), {n: one.grad for n, one in model.named_parameters() if one.grad is not None}))
    assert_same(results[1], results[0], 2e-2)


def test_frozen_weights_and_inputs_get_no_gradient_and_nothing_is_kept_without_any() -> None:
    model = adapted()
    model.save_memory(MemorySavings(ffn_chunk=4))
    ids = tiny.tokens(1, TOKENS)
    whole = model(ids)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), whole.detach())
    model.requires_grad_(False)
    assert not model(ids).requires_grad
