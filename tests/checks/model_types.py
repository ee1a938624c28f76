"""Tiny models of many types of transformers, shrunk as mode=check shrinks them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from hybrid_models import CONFIGS

from flashtrain.integrations import register_with_transformers
from flashtrain.integrations.huggingface_shrinking import shrunk

_SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MIXED = {
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 2, "num_experts_per_tok": 2,
}  # fmt: skip
# Attention alone, with what each adds to _SIZES.
TYPES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": 64}, "qwen2": {}, "qwen3": {"head_dim": 16},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 32,
                  "shared_expert_intermediate_size": 32},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16},
    "mixtral": {"num_local_experts": 8}, "phi3": {}, "olmo2": {}, "olmo3": _MIXED,
    "granite": {}, "starcoder2": {"sliding_window": None}, "cohere2": _MIXED,
    "glm4": {"head_dim": 16},
    "smollm3": {}, "stablelm": {}, "gemma2": {"head_dim": 16, **_MIXED},
    "gemma3_text": {"head_dim": 16, **_MIXED}, "gpt_neox": {}, "deepseek_v3": _LATENT,
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}, "exaone4": _MIXED,
    "llama4_text": {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4,
                    "attention_chunk_size": 64, "no_rope_layers": [1, 1, 1, 0],
                    "layer_types": ["chunked_attention"] * 3 + ["full_attention"]},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 8, **_MIXED}, "opt": {"ffn_dim": 96,
    "word_embed_proj_dim": 64}, "ernie4_5": {"head_dim": 16}, "seed_oss": {"head_dim": 16},
}  # fmt: skip


def model_of(kind: str, attention: str | None = None) -> Any:
    """The small model of a type; attention: ours unless given."""
    sizes = CONFIGS[kind] if kind in CONFIGS else {**_SIZES, **TYPES[kind]}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    implementation = attention or register_with_transformers()
    torch.manual_seed(0)
    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=implementation
        )
    return shrunk(whole)
