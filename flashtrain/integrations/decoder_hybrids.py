"""The format in which transformers stores a decoder that Decoder can be. Beside FORMATS, of
attention alone, these are Granite 4's of Mamba-2 and attention, and Qwen3.5's of the gated delta
rule alone, since its attention is not ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashtrain.integrations.decoder_formats import FORMATS, ROTARY_NAMES, ROTARY_SIZES, Format
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.block import EPSILON
from flashtrain.models.decoder_config import DecoderConfig
from flashtrain.models.state_mixer import WIDTH


def transformers_format(config: DecoderConfig) -> tuple[str, Format, DecoderConfig] | None:
    """Return transformers' model_type and format for a decoder, and the decoder of alike layers of
    attention that has its sizes (with states: another one); None if there is none."""
    for name, form in FORMATS.items():
        if form.holds(config):
            return name, form, config
    each: Any = {layer.mixer for layer in config.layers}
    kinds = " ".join(sorted(mixer.kind for mixer in each))
    if kinds not in ("mamba2", "attention mamba2", "delta"):
        return None
    state = next(one for one in each if one.kind != "attention")
    heads, dim = state.heads // state.expand, state.head_dim
    alone = AttentionSpec(heads, heads, dim, rotary=True)
    attention = next((one for one in each if one is not state), alone)
    same = replace(attention, rotary=True)
    plain = replace(config, layers=tuple(replace(one, mixer=same) for one in config.layers))
    types = "linear_attention", "full_attention"
    own = {
        "rms_norm_eps": EPSILON,
        "layer_types": [types[one.mixer == attention] for one in config.layers],
        "use_cache": attention is not alone,  # transformers' caches count by attention's keys
    }
    if state.kind == "mamba2":
        kind, architecture = "granitemoehybrid", "GraniteMoeHybridForCausalLM"
        theirs, ffn, width = "mamba", "shared_mlp", "shared_intermediate_size"
        inputs, up, down = [""], ["input_linear"], "output_linear"
        sizes = {"n_heads": state.heads, "n_groups": 1, "d_state": state.key_dim, "d_conv": WIDTH}
        sizes |= {"d_head": dim, "expand": state.expand}
        own |= {f"mamba_{name}": value for name, value in sizes.items()}
        own["position_embedding_type"] = "rope" if attention.rotary else None
        own |= {"attention_multiplier": dim**-0.5, "num_local_experts": 0}
    else:
        kind, architecture = "qwen3_5_text", "Qwen3_5ForCausalLM"
        theirs, ffn, width = "linear_attn", "mlp", ROTARY_SIZES["ffn"]
        inputs, up, down = ["_z", "_qkv", "_a", "_b"], ["gate_proj", "up_proj"], "down_proj"
        sizes = {"num_key_heads": heads, "num_value_heads": heads, "conv_kernel_dim": WIDTH}
        sizes |= {"key_head_dim": dim, "value_head_dim": dim}
        own |= {f"linear_{name}": value for name, value in sizes.items()}
    names: dict[str, tuple[str, ...]] = {
        **{f"{state.kind}{one}": (f"{theirs}{one}",) for one in ("", ".conv1d", ".norm")},
        **ROTARY_NAMES,
        f"{state.kind}_norm": ("input_layernorm",),
        f"{state.kind}.inputs": tuple(f"{theirs}.in_proj{one}" for one in inputs),
        f"{state.kind}.output": (f"{theirs}.out_proj",),
        "feed_forward.up": tuple(f"{ffn}.{one}" for one in up),
        "feed_forward.down": (f"{ffn}.{down}",),
    }
    form = Format(
        architecture=architecture,
        ours={"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False},
        prefix="model.",
        layer="layers",
        names=names,
        sizes={**ROTARY_SIZES, "ffn": width},
        absent={},
        computation={name: (value,) for name, value in own.items()},
        less_one=state.kind == "delta",
    )
    return (kind, form, plain) if form.holds(plain) else None
