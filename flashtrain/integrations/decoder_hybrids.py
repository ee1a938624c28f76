"""Our decoders with states in transformers' formats: Granite 4's, of Mamba-2 and attention, and
Qwen3-Next's of the gated delta rule alone, since its attention is another than ours.

Letters: H heads, D head dimension, E embedding width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.block import EPSILON
from flashtrain.models.convolved_mixer import WIDTH
from flashtrain.models.decoder_config import DecoderConfig
from flashtrain.models.layer_spec import mixers

CLASSES = {
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
# Our modules and theirs; of a layer after its number.
NAMES = {
    "token_embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "feed_forward_norm": "post_attention_layernorm",
    "attention_norm": "input_layernorm",
    "attention.output": "self_attn.o_proj",
    "mamba2_norm": "input_layernorm",
    "mamba2.inputs": "mamba.in_proj",
    "mamba2.output": "mamba.out_proj",
    "mamba2.norm": "mamba.norm",
    "delta_norm": "input_layernorm",
    "delta.output": "linear_attn.out_proj",
    "delta.norm": "linear_attn.norm",
    "feed_forward.down": "mlp.down_proj",
}
GRANITES = {
    "feed_forward.up": "shared_mlp.input_linear",
    "feed_forward.down": "shared_mlp.output_linear",
}
MIXERS = {"mamba2": "mamba", "delta": "linear_attn"}


def hybrid_kind(config: DecoderConfig) -> str | None:
    """Return the model_type of transformers' class that a decoder with states is; None if there is
    none."""
    each = {layer.mixer for layer in config.layers}
    attention, states = set(mixers(config.layers, AttentionSpec)), {one.kind for one in each}
    inner = {layer.feed_forward for layer in config.layers}
    same = len(attention) < 2 and len(inner) == 1 and all(one.gated for one in inner)
    if not same or any(one.window or one.chunk for one in attention):
        return None
    if config.bias or (config.norm, config.positions) != ("rmsnorm", "rotary"):
        return None
    kinds = {"mamba2": "granitemoehybrid", "attention mamba2": "granitemoehybrid"}
    return {**kinds, "delta": "qwen3_next"}.get(" ".join(sorted(states)))


def hybrid_content(kind: str, config: DecoderConfig) -> dict[str, Any]:
    """Return the content of transformers' config.json for a decoder of a hybrid_kind."""
    attention = next(iter(mixers(config.layers, AttentionSpec)), None)
    state: Any = next(one.mixer for one in config.layers if one.mixer.kind in MIXERS)
    heads = attention.heads if attention else state.heads // state.expand
    head_dim, ffn = config.embed // heads, config.layers[0].feed_forward.width
    full = [isinstance(layer.mixer, AttentionSpec) for layer in config.layers]
    content = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed,
        "intermediate_size": ffn,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": heads,
        "num_key_value_heads": attention.kv_heads if attention else heads,
        "max_position_embeddings": config.context,
        "rms_norm_eps": EPSILON,
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": attention is not None,  # transformers' caches count by attention's keys
        "layer_types": ["full_attention" if one else "linear_attention" for one in full],
        "rope_parameters": {
            "rope_type": "default",
            **config.rope.parameters(config.rope_base, head_dim),
        },
    }
    if kind == "qwen3_next":
        sizes = {"num_key_heads": heads, "num_value_heads": heads, "conv_kernel_dim": WIDTH}
        sizes |= {"key_head_dim": head_dim, "value_head_dim": head_dim}
        own = {f"linear_{name}": value for name, value in sizes.items()}
        return {**content, **own, "num_experts": 0, "head_dim": head_dim}
    sizes = {"n_heads": state.heads, "n_groups": 1, "d_state": state.key_dim, "d_conv": WIDTH}
    sizes |= {"d_head": state.head_dim, "expand": state.expand}
    own = {f"mamba_{name}": value for name, value in sizes.items()}
    own |= {"shared_intermediate_size": ffn, "num_local_experts": 0}
    own["position_embedding_type"] = "rope" if attention is None or attention.rotary else None
    return {**content, **own, "attention_multiplier": head_dim**-0.5}


def hybrid_tensors(
    kind: str, config: DecoderConfig, state: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a decoder's tensors, of its state dict, as transformers' class of a hybrid_kind has
    them."""
    names = NAMES | (GRANITES if kind == "granitemoehybrid" else {})
    for name, x in state.items():
        module, end = name.rsplit(".", 1)
        if kind == "qwen3_next" and module.endswith("_norm"):
            x = x - 1  # it multiplies by 1 + weight
        if module in names:
            yield f"{names[module]}.{end}", x[: config.vocab_size] if x.dim() == 2 else x
            continue
        _, layer, module = module.split(".", 2)
        mixer: Any = config.layers[int(layer)].mixer
        parts = {f"{names.get(module)}.{end}": x}
        if module in MIXERS:  # a parameter of its own
            conv = {"convolution": "conv1d.weight", "convolution_bias": "conv1d.bias"}
            x = x[:, None] if end == "convolution" else x
            parts = {f"{MIXERS[module]}.{conv.get(end, end)}": x}
        elif module == "attention.qkv":
            keys = mixer.kv_heads * mixer.head_dim
            split = x.split([len(x) - 2 * keys, keys, keys])
            parts = dict(zip((f"self_attn.{one}_proj.{end}" for one in "qkv"), split, strict=True))
        elif module == "delta.inputs":
            # Theirs are ordered by heads: q, k, v and the gate of each; beta and the decay of each.
            gate, q, k, v, decay, beta = x.split([mixer.inner] * 4 + [mixer.heads] * 2)
            rows = {"qkvz": (q, k, v, gate), "ba": (beta, decay)}
            parts = {
                f"linear_attn.in_proj_{theirs}.{end}": torch.cat(
                    [one.unflatten(0, (mixer.heads, -1)) for one in split], 1
                ).flatten(0, 1)
                for theirs, split in rows.items()
            }
        elif module not in names:  # Qwen3-Next's feed-forward
            gate, up = x.chunk(2)
            parts = {f"mlp.gate_proj.{end}": gate, f"mlp.up_proj.{end}": up}
        for each, part in parts.items():
            yield f"model.layers.{layer}.{each}", part
