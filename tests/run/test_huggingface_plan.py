"""What a transformers model needs of a GPU, from its configuration alone: no
weight is there to be read."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch

from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain.integrations import huggingface_folder
from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
from flashtrain.tasks.batching import Batching, choose_batching
from flashtrain.tasks.decoders import make_model
from flashtrain.tasks.language.plan import plan_language
from flashtrain.tasks.language.prepare import model_builder
from flashtrain.training.hardware import Hardware
from flashtrain.training.memory import GIB

H200 = Hardware(
    "cuda", "NVIDIA H200", 2, (9, 0), 139 * GIB, 139 * GIB, 989e12, "bf16-mixed", "flash", 960 * GIB
)  # fmt: skip
QWEN3_8B = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
PARAMETERS = 8_190_735_360


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("qwen3-8b") / "config.json"
    path.write_text(json.dumps(QWEN3_8B))
    return path


def settings_of(config: Path, *words: str):
    own = (
        f"model.config={config}",
        "data.tokenizer=gpt2",
        "context=32768",
        "trainer.tokens_per_step=65536",
    )
    return compose_settings(["recipe=hf", *own, *words])


def batching(config: Path, *words: str) -> Batching:
    settings = settings_of(config, *words)
    with torch.device("meta"):
        model = make_model(
            settings.model, vocab_size=50257, context=settings.context, attention="flash"
        )
    model.keep_in(H200.precision)
    return choose_batching(settings, H200, model)


def test_weights_and_states_are_divided_among_devices(config: Path) -> None:
    found = batching(config, "trainer.devices=2", "trainer.strategy=fsdp").estimate
    assert found.gradients == PARAMETERS * 4 // 2
    assert found.optimizer == PARAMETERS * 8 // 2
    # The head is no part of them, and the last norm is in no layer.
    embeddings = 2 * 151936 * 4096 + 4096
    gathered = 2 * (PARAMETERS - embeddings) // 36 + embeddings
    assert found.weights == PARAMETERS * 4 // 2 + gathered * 2
    assert batching(
        config, "trainer.devices=2", "trainer.strategy=fsdp", "optimizer.states=8bit"
    ).estimate.optimizer == (PARAMETERS * 2 // 2)


def test_adapters_leave_the_weights_in_half_precision_and_without_gradients(config: Path) -> None:
    lora = batching(config, "model.adapter=lora").estimate
    # Two thin matrices each, rank 16.
    trained = 36 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))
    assert lora.gradients == trained * 4
    assert lora.weights == PARAMETERS * 2 + trained * (4 + 2)
    pytest.importorskip("torchao")
    quantized = batching(config, "model.adapter=lora", "model.quantize=nf4").estimate
    assert lora.weights - quantized.weights == pytest.approx(
        1.484375 * (PARAMETERS - 2 * 151936 * 4096), rel=1e-3
    )


def test_a_plan_says_what_would_be_trained_and_reads_no_weights(config: Path) -> None:
    text = plan_language(
        settings_of(
            config,
            "memory.activation_checkpointing=full",
            "trainer.devices=2",
            "trainer.strategy=fsdp",
        ),
        H200,
    )
    assert text.startswith("qwen3-8b0: 8190.7M parameters, context 32768, attention flash")
    assert "full checkpointing" in text
    assert "nothing was started" in text
    lora = plan_language(settings_of(config, "model.adapter=lora"), H200)
    assert "M parameters (43.65M of them trained), context" in lora


# Each names its layers by another entry.
SHARED = {
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, None),
    "qwen3_next": ({"full_attention_interval": 2, "head_dim": 8}, "1 layers of linear_attention"),
    "kimi_linear": (
        {
            "layer_types": ["linear_attention", "full_attention"],
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2},
            **{"num_local_experts": 4, "moe_intermediate_size": 16},
        },
        "1 layers of linear_attention",
    ),
    "falcon_h1": ({"head_dim": 8}, "2 layers of hybrid"),
    "bamba": (
        {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16},
        "1 layers of linear_attention",
    ),
    "nemotron_h": (
        {"hybrid_override_pattern": "M-*E", "num_hidden_layers": 4},
        "1 layers of linear_attention",
    ),
    "zamba2": ({"layers_block_type": ["mamba", "hybrid"]}, "1 layers of hybrid"),
    "mamba2": ({"head_dim": 16, "num_heads": 4}, "2 layers of linear_attention"),
}
REFUSED = {
    "jamba": ({"attn_layer_period": 2, "attn_layer_offset": 0}, "layers of linear_attention"),
    "minimax": (
        {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4},
        "layers of linear_attention",
    ),
    "zaya": ({"head_dim": 16, "num_experts": 4, "router_hidden_size": 16}, "layers of hybrid"),
    # Not served on one device either.
    "recurrent_gemma": (
        {"block_types": ["recurrent", "attention"]},
        "by linear_attention in 1 of 2 layers",
    ),
    "rwkv": ({}, "by recurrent states"),  # whose configuration says nothing
}


def plan_of_hybrid(kind: str, more: dict, tmp_path: Path, *words: str) -> str:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = {"model_type": kind, **sizes, "vocab_size": 50304, "num_key_value_heads": 2, **more}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shared = "trainer.devices=2", "trainer.strategy=context_parallel"
    return plan_language(settings_of(tmp_path, *shared, *words), H200)


@pytest.mark.parametrize("kind", SHARED)
def test_a_plan_says_what_devices_that_share_a_hybrid_s_sequences_pass(
    kind: str, tmp_path: Path
) -> None:
    more, said = SHARED[kind]
    lines = plan_of_hybrid(kind, more, tmp_path)
    assert "over 2 devices" in lines
    assert "memory: " in lines
    assert ("states: a device sends" in lines) == (said is not None)
    assert said is None or said in lines
    assert f"layout: {'contiguous' if kind == 'mamba2' else 'zigzag'}, 16,384 tokens" in lines


@pytest.mark.parametrize(
    ("name", "billions", "layers"), [("qwen3.5-9b", 8.954, 24), ("nemotron-3-nano-30b", 31.578, 23)]
)
def test_the_shapes_of_hybrids_are_those_published_and_are_planned(
    name: str, billions: float, layers: int
) -> None:
    """Nemotron 3 Nano's report: 31.6B parameters, 3.2B for a token without the embeddings."""
    settings = settings_of(name, "data.document_mask=true", "mode=plan")
    with torch.device("meta"):
        model = make_model(settings.model, vocab_size=0, context=32768, attention="flash")
    assert model.parameter_count() / 1e9 == pytest.approx(billions, abs=1e-3)
    assert sum(getattr(one.mixer, "state", 0) > 0 for one in model.shape.layers) == layers
    if name.startswith("nemotron"):
        assert model.flops_per_token(1) / 6e9 == pytest.approx(3.2, rel=0.05)
    text = plan_language(settings, H200)
    assert "does not fit: needs" in text
    assert "memory.ffn_chunk=16384" in text


def test_a_plan_s_states_have_the_size_of_a_run_s_map_whatever_the_context(tmp_path: Path) -> None:
    """Of Qwen3-Next's sizes: 32 heads, maps of 128 x 128 for states of 128 x 128, in float32."""
    for context in (8192, 32768):
        lines = plan_of_hybrid(
            "qwen3_next", QWEN3_NEXT, tmp_path, f"context={context}", "trainer.micro_batch=1"
        )
        assert "states: a device sends 4.00 MiB forward and backward for each of its runs" in lines


@pytest.mark.parametrize("kind", REFUSED)
def test_a_hybrid_whose_devices_cannot_share_sequences_is_refused_by_its_configuration(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HuggingFaceDecoder, "materialise", None)
    more, said = REFUSED[kind]
    with pytest.raises(UserError, match=said):
        plan_of_hybrid(kind, more, tmp_path)


QWEN3_NEXT = {
    **{"model_type": "qwen3_next", "num_hidden_layers": 4, "num_experts": 8, "vocab_size": 50304},
    "max_position_embeddings": 32768,
}


def test_a_plan_counts_layers_of_a_state_by_their_recurrence(tmp_path: Path) -> None:
    """Sizes of Qwen3-Next: 32 value heads with states of 128 x 128, 16 query and key heads;
    attention of 16 x 256."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT))
    settings = settings_of(tmp_path, "trainer.micro_batch=1")
    with torch.device("meta"):
        model = make_model(
            settings.model, vocab_size=50257, context=settings.context, attention="flash"
        )
    *states, attention = (layer.mixer for layer in model.shape.layers)
    # Whatever the context.
    assert [state.flops(32768) for state in states] == [3 * 6 * 32 * 128 * 128] * 3
    assert attention.flops(32768) == 12 * 16 * 256 * 32768 / 2
    assert model.flops_per_token(32768) - model.flops_per_token(2) == attention.flops(
        32768
    ) - attention.flops(2)
    memory = states[0].memory(tokens=32768, context=32768, activation=2, attention="flash")
    keys, values, beta_and_decay, inverse = 2 * 16 * 128, 32 * 128, 2 * 32, 64 * 32
    assert memory.inputs + memory.result == 2 * (
        2 * (keys + values) + 3 * values + beta_and_decay + inverse
    )
    lines = plan_language(settings, H200)
    assert "time:" in lines
    assert "memory:" in lines


def test_4_bits_need_torchao_for_a_training_and_not_for_a_plan(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torchao", "torchao.quantization"):
        monkeypatch.setitem(sys.modules, name, None)
    settings = settings_of(config, "model.adapter=lora", "model.quantize=nf4")
    assert "memory: " in plan_language(settings, H200)
    with pytest.raises(UserError, match=r"model\.quantize=nf4 needs .*torchao"):
        model_builder(settings)  # before any text is read


def test_a_hub_that_does_not_answer_is_reported_with_the_setting_that_needs_no_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
        with pytest.raises(UserError, match=r"model\.config=NAME has the shape of .*qwen3-8b"):
            huggingface_folder.folder_of("Qwen/Qwen3-8B")


def test_layers_of_unknown_flops_give_no_time_and_no_mfu(tmp_path: Path) -> None:
    latent = {
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
    }
    indexed = {
        **latent,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
        "num_attention_heads": 4,
    }
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "vocab_size": 50304,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "deepseek_v32", **sizes, **indexed})
    )
    settings = settings_of(tmp_path, "trainer.micro_batch=1", "attention=standard")
    lines = plan_language(settings, replace(H200, attention="standard")).splitlines()
    assert lines.count("no TFLOP/s, MFU and time: the FLOPs of indexed_attention are unknown") == 1
    assert not any(line.startswith(("time:", "memory:")) for line in lines)
