"""Packed documents of transformers' hybrids do not see each other: each equals the
same class on it alone."""

from __future__ import annotations

import logging
import re
import sys
import types
from contextlib import nullcontext

import hybrid_models
import pytest
import torch
import transformers
from hybrid_models import CONFIGS, LENGTHS, Wide, decoder, hybrid
from torch.nn import functional as F

from flashtrain.errors import UserError
from flashtrain.integrations import huggingface_decoder, huggingface_mixers, huggingface_model
from flashtrain.integrations.huggingface_mixers import FUNCTIONS, serve_mixers, served, using
from flashtrain.models.activation_checkpointing import MemorySavings
from flashtrain_kernels.recurrences import Rows, fla

TOKENS = torch.randint(3, 64, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))
POSITIONS = torch.stack(
    (torch.cat([torch.arange(length) for length in LENGTHS]), torch.arange(sum(LENGTHS)))
)
WEIGHTS = torch.randn(
    2, sum(LENGTHS), 64, generator=torch.Generator().manual_seed(5), dtype=torch.float64
)


def of_each_alone(model):
    """Logits and gradients of transformers' own class; the second row is one document."""
    logits = torch.stack(
        [
            torch.cat(
                [
                    model(input_ids=one[None], use_cache=False).logits[0]
                    for one in row.split(lengths)
                ]
            )
            for row, lengths in zip(TOKENS, (LENGTHS, [sum(LENGTHS)]), strict=True)
        ]
    )
    (logits * WEIGHTS).sum().backward()
    return logits, gradients(model)


def gradients(model):
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def error(found, expected) -> float:
    return float((found - expected).norm() / expected.norm())


def worst(found, expected) -> float:
    assert found.keys() == expected.keys()
    return max(error(found[name], one) for name, one in expected.items() if one.norm() > 1e-9)


def stock(kind: str, dtype: torch.dtype):
    """transformers' class with attention of its own."""
    return hybrid(
        kind, dtype, attention="sdpa" if kind not in ("mamba2", "falcon_mamba") else "eager"
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_packed_documents_equal_each_alone_in_logits_loss_and_all_gradients(kind):
    model, alone = decoder(kind), stock(kind, torch.float64)
    with Wide():
        expected, of_alone = of_each_alone(alone)
        logits = model(TOKENS, positions=POSITIONS)
        (logits * WEIGHTS).sum().backward()
        loss = model.loss(TOKENS, TOKENS, positions=POSITIONS)
    assert error(logits, expected) < 1e-10
    assert worst(gradients(model.module), of_alone) < 1e-10
    torch.testing.assert_close(
        loss, F.cross_entropy(expected.flatten(0, 1), TOKENS.flatten()).to(loss)
    )


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
@pytest.mark.parametrize(
    "kind", ["qwen3_next", "kimi_linear", "granitemoehybrid", "jamba", "lfm2", "minimax"]
)
def test_rows_are_current_when_layers_are_computed_again(kind, checkpointing):
    model = decoder(kind, torch.float32)
    model.save_memory(MemorySavings(checkpointing))
    logits = model(TOKENS, positions=POSITIONS)
    (logits * WEIGHTS).sum().backward()
    expected, of_alone = of_each_alone(stock(kind, torch.float32))
    assert error(logits, expected) < 1e-5
    assert worst(gradients(model.module), of_alone) < 3e-4


@pytest.mark.parametrize("kind", ["nemotron_h", "mamba2"])
def test_feed_forwards_in_chunks_leave_layers_that_have_none_alone(kind):
    model = decoder(kind, torch.float32)
    widths = [layer.feed_forward.width for layer in model.shape.layers]
    assert widths == ([0, 16, 0, 48] if kind == "nemotron_h" else [0, 0])
    model.save_memory(MemorySavings("full", ffn_chunk=50))
    logits = model(TOKENS, positions=POSITIONS)
    (logits * WEIGHTS).sum().backward()
    expected, of_alone = of_each_alone(stock(kind, torch.float32))
    assert error(logits, expected) < 1e-5
    assert worst(gradients(model.module), of_alone) < 3e-4


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("kind", ["qwen3_5_text", "bamba", "lfm2"])
def test_compiled_layers_compute_the_same_and_break_at_what_knows_the_rows_alone(kind):
    losses, found, breaks = [], [], torch._dynamo.utils.counters["graph_break"]
    for compiled in (False, True):
        model = decoder(kind, torch.float32)
        torch._dynamo.reset()
        breaks.clear()
        if compiled:
            model.compile_blocks(dynamic=False, backend="aot_eager")
        loss = model.loss(TOKENS, TOKENS, positions=POSITIONS)
        loss.backward()
        losses.append(loss.detach())
        found.append(gradients(model.module))
    torch.testing.assert_close(*losses)
    assert worst(found[1], found[0]) < 1e-5
    names = "|".join(name for name in FUNCTIONS)
    assert breaks
    assert all(re.search(rf"Skip calling function `<function ({names}) ", one) for one in breaks)


def test_without_positions_and_outside_of_the_decoder_transformers_own_functions_run():
    model, own = decoder("qwen3_5_text", torch.float32), stock("qwen3_5_text", torch.float32)
    packed = {"input_ids": TOKENS, "position_ids": POSITIONS, "use_cache": False}
    assert torch.equal(model(TOKENS), model.module(input_ids=TOKENS, use_cache=False).logits)
    assert error(model.module(**packed).logits, own(**packed).logits) < 1e-6


REFUSED = "fla-core refuses Triton 3.6.0 on Hopper in the backward: expected 3.7.1 or later"


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [(True, None), (True, REFUSED), (True, "fla-core is not installed"), (False, None)],
)
def test_a_gpu_s_versions_are_known_before_weights_are_read_and_what_fla_refuses_is_not_called(
    gpu, reason, monkeypatch, caplog
):
    """transformers calls fla-core whenever it can be imported, and it refuses CPUs, and some
    versions in the backward."""
    module = types.ModuleType("made_module")
    module.torch_chunk_gated_delta_rule = lambda *_, **__: ("theirs", None)
    monkeypatch.setitem(sys.modules, "made_module", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(fla, "unavailable", lambda operator, device: reason)
    installed = reason != "fla-core is not installed"
    monkeypatch.setattr(huggingface_mixers, "find_spec", lambda _: object() if installed else None)
    with caplog.at_level(logging.INFO, "flashtrain"):
        fast = serve_mixers(type("Made", (), {"__module__": "made_module"}))
    assert fast == (gpu and reason is None)
    assert [reason in line and "constraints-linear.txt" in line for line in caplog.messages] == (
        [] if reason is None else [True]
    )
    q = k = v = torch.randn(1, 8, 2, 4)
    g, beta = -torch.rand(1, 8, 2), torch.rand(1, 8, 2)
    named = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": True}
    for positions, ours in ((torch.arange(8)[None], installed), (torch.arange(8)[None] % 4, True)):
        with using(Rows(positions)):
            out, _ = module.torch_chunk_gated_delta_rule(q, k, v, **named)
        assert isinstance(out, torch.Tensor) == ours
    assert module.torch_chunk_gated_delta_rule(q, k, v, **named)[0] == "theirs"


def test_a_call_with_a_cache_gets_transformers_own_functions(monkeypatch):
    model, seen = decoder("qwen3_5_text", torch.float32).eval(), []
    monkeypatch.setattr(
        huggingface_decoder, "using", lambda rows, *_: seen.append(rows) or nullcontext()
    )
    model(TOKENS, positions=POSITIONS, cache=model.new_cache())
    assert seen[0] is None


def test_only_classes_of_transformers_own_modules_are_served():
    own = type("Own", (transformers.BambaForCausalLM,), {"__module__": "__main__"})
    named_alike = type("Own", (torch.nn.Module,), {"__module__": "mine.bamba.modeling_bamba"})
    classes = (transformers.BambaForCausalLM, transformers.BambaConfig, own, named_alike)
    assert [served(kind) for kind in classes] == [True, True, False, False]


def test_training_keeps_no_cache():
    model, seen = decoder("bamba", torch.float32), []
    model.module.config.use_cache = True
    for layer in model.blocks:
        layer.register_forward_pre_hook(lambda _, args, named: seen.append(named), with_kwargs=True)
    model.loss(TOKENS, TOKENS, positions=POSITIONS)
    assert len(seen) == 2
    assert all(
        named.get("past_key_values") is None and not named.get("use_cache") for named in seen
    )


def of_own_configuration(kind: str, **options):
    return huggingface_model.transformers_decoder(
        config=kind, changes=hybrid_models.CONFIGS[kind], **options
    )


def test_a_saved_configuration_is_read_as_it_was_written_with_its_infinite_steps(tmp_path):
    hybrid("bamba").config.save_pretrained(tmp_path)
    read = huggingface_model.transformers_decoder(config=str(tmp_path)).config
    assert list(read.time_step_limit) == [0.0, float("inf")]


@pytest.mark.parametrize("packed", [True, False])
def test_an_adapter_of_out_proj_learns_though_mamba_ssm_s_fused_call_reads_its_weight(
    packed, monkeypatch
):
    module = sys.modules[type(hybrid("bamba")).__module__]

    def fused(states, *_, outproj_weight, **__):  # mamba_ssm's signature as far as it matters
        return F.linear(states[..., : outproj_weight.shape[1]], outproj_weight)

    monkeypatch.setattr(module, "mamba2_split_conv1d_scan_combined", fused)
    model = of_own_configuration(
        "bamba", lora={"r": 2, "target_modules": ["out_proj"], "init_lora_weights": False}
    )
    model.materialise(torch.device("cpu"))
    model.train().loss(TOKENS, TOKENS, positions=POSITIONS if packed else None).backward()
    assert all(one.grad.norm() > 0 for name, one in model.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize(
    ("kind", "target"),
    [("qwen3_5_text", "conv1d"), ("lfm2", "conv"), ("jamba", "dt_proj"), ("kimi_linear", "conv1d")],
)
def test_an_adapter_of_a_weight_that_a_mixer_reads_is_refused_and_all_linear_passes_it_over(
    kind, target
):
    with pytest.raises(UserError, match=rf"adapter_targets.*{target}"):
        of_own_configuration(kind, lora={"r": 2, "target_modules": [target]})
    model = of_own_configuration(kind, lora={"r": 2, "target_modules": "all-linear"})
    assert model.adapters
    assert not any(name.endswith(f".{target}") for name, _ in model.adapters)


def test_linear_layers_that_peft_s_all_linear_passes_over_are_named_in_a_line(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(huggingface_model, "_say_once", said.append)
    model = of_own_configuration("qwen3_next", lora={"r": 2, "target_modules": "all-linear"})
    passed = [f"mlp.shared_expert.{one}_proj" for one in ("down", "gate", "up")]
    assert said[-1].endswith(f"gives none to {', '.join(passed)}")
    layers = {".".join(name.split(".")[-2:]) for name, _ in model.adapters}
    assert "mlp.experts" in layers
    assert not any(one.startswith("shared_expert.") for one in layers)
    said.clear()
    of_own_configuration("lfm2", lora={"r": 2, "target_modules": "all-linear"})
    assert said == []


def test_frozen_decays_stay_float32_beside_frozen_matrices_in_bfloat16():
    model = of_own_configuration("bamba", lora={"r": 2, "target_modules": ["in_proj"]})
    model.keep_in("bf16-mixed")
    dtypes = {
        name.rpartition(".")[2]: one.dtype
        for name, one in model.named_parameters()
        if ".mamba." in name
    }
    assert (dtypes["A_log"], dtypes["dt_bias"], dtypes["D"]) == (
        torch.float32,
        torch.float32,
        torch.bfloat16,
    )
