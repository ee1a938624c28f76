"""Tiny random hybrids of transformers whose states decay slowly, so that another
document's would be seen."""

from __future__ import annotations

import torch
import transformers
from torch.overrides import TorchFunctionMode

from flashtrain.integrations import register_with_transformers
from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder

LENGTHS = [70, 1, 16]  # documents of a row
# Whose recurrences devices cannot share.
ON_ONE_DEVICE = ("falcon_mamba", "jamba", "minimax", "zaya")
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BASE = {
    **_SIZES,
    **{
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
    },
    "max_position_embeddings": 512,
}
_LINEAR = {**_BASE, "layer_types": ["linear_attention", "full_attention"]}
_DELTA = {
    **{**_LINEAR, "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
_TOP = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_EXPERTS = {**_TOP, "num_experts": 4, "shared_expert_intermediate_size": 16}
_LATENT = {
    **{**_LINEAR, **_TOP, "num_key_value_heads": 2, "num_local_experts": 4, "kv_lora_rank": 8},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}
_MAMBA = {
    **{
        "mamba_n_heads": 4,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
        "mamba_expand": 2,
        "mamba_n_groups": 2,
    },
}
_CONV = {**_BASE, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
_ALONE = {**_SIZES, "state_size": 8, "num_hidden_layers": 2}
CONFIGS = {
    "qwen3_next": {**_DELTA, **_EXPERTS},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {
        name: size for name, size in {**_DELTA, **_EXPERTS}.items() if name != "intermediate_size"
    },
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4},
    "kimi_linear": {
        **_LATENT,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "bailing_hybrid": {
        **_LATENT,
        "head_dim": 16,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "nemotron_h": {
        **{name: size for name, size in _BASE.items() if name != "num_hidden_layers"},
        **{
            **_TOP,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "head_dim": 16,
        },
        **{
            "ssm_state_size": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 16,
        },
        **{"n_routed_experts": 4, "moe_shared_expert_intermediate_size": 16},
    },
    "granitemoehybrid": {
        **_LINEAR,
        **_MAMBA,
        "num_local_experts": 4,
        "shared_intermediate_size": 16,
    },
    "bamba": {**_BASE, **_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_BASE, **_MAMBA, "mamba_d_ssm": 64},
    "zamba2": {
        **{**_BASE, "num_key_value_heads": 2, "layers_block_type": ["linear_attention", "hybrid"]},
        **{
            "mamba_d_state": 8,
            "mamba_ngroups": 2,
            "n_mamba_heads": 4,
            "chunk_size": 16,
            "num_mem_blocks": 1,
        },
    },
    "mamba2": {**_ALONE, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16},
    "falcon_mamba": _ALONE,
    "jamba": {
        **_BASE,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "lfm2": _CONV,
    "lfm2_moe": {**_CONV, **_TOP, "num_dense_layers": 1, "num_experts": 4},
    "lfm3": {
        **_BASE,
        "head_dim": 16,
        "layer_types": ["conv", "sliding_attention"],
        "sliding_window": 32,
    },
    "minimax": {**_LINEAR, "head_dim": 16, "num_local_experts": 4, "block_size": 16},
    "zaya": {
        **_BASE,
        "head_dim": 16,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "router_hidden_size": 16,
    },
}


class Wide(TorchFunctionMode):
    """Casts to float32 are casts to float64, since many classes compute parts in float32."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            return args[0].double()
        args = [torch.float64 if one is torch.float32 else one for one in args]
        named = {
            name: torch.float64 if one is torch.float32 else one
            for name, one in (kwargs or {}).items()
        }
        return function(*args, **named)


def hybrid(kind: str, dtype: torch.dtype = torch.float64, attention: str | None = None, **changes):
    """A transformers model, the same each time; attention: ours unless given."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**CONFIGS[kind], **changes})
    for name in ("dropout", "hidden_dropout", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    names = {
        "attn_implementation": attention or register_with_transformers(),
        "experts_implementation": "eager",
    }
    model = transformers.AutoModelForCausalLM.from_config(config, **names).train()
    for name, one in model.named_parameters():
        last = name.rpartition(".")[2]
        if last in ("A_log", "dt_bias"):
            one.data.uniform_(-2.0, 0.0)
        elif one.dim() > 1 or ("norm" not in name and last != "D"):
            one.data.normal_(0, (0.5 if "conv" in name else 0.25) if one.dim() > 1 else 0.1)
    model = model.to(dtype)
    for layer in model.modules():
        # It has rounded its buffers to float32.
        if type(layer).__name__ == "MiniMaxLightningAttention":
            decays = layer.decay_factors(layer.slope_rate)
            layer.query_decay, layer.key_decay, layer.diagonal_decay = decays
    return model


def decoder(kind: str, dtype: torch.dtype = torch.float64, **changes) -> HuggingFaceDecoder:
    return HuggingFaceDecoder(hybrid(kind, dtype, **changes))
