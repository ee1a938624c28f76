"""Decoders with rotary positions as Hugging Face transformers stores them, both ways: model=modern in Llama's layout,
GPT-2 with rotary positions in Starcoder2's (which is Llama's but for LayerNorm and a feed-forward of two matrices).

    save_llama(model, "for_transformers")           # AutoModelForCausalLM.from_pretrained("for_transformers")
    config, state_dict = load_llama("for_transformers")
    model = GPT2(config)
    model.load_state_dict(state_dict)

Both turn the pairs (i, i + D/2) of a head as RotaryPositions does. They keep apart what our models compute as one
product (q, k, v; gate and value), and have exactly as many embedding rows as tokens.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.integrations.weight_files import (
    CONFIG,
    SHARD_BYTES,
    Part,
    converted,
    read_architecture,
    read_folder,
    write_folder,
)
from flashtrain.models.block import EPSILON
from flashtrain.models.gpt2 import GPT2, GPT2Config, round_up


class Layout(NamedTuple):
    """One of transformers' decoders. ours: what it is in GPT2Config. up: its names of feed_forward.up's parts.
    computation: what its config.json may say, the first where it says nothing; epsilon and biases: entries of it."""

    architecture: str
    ours: dict[str, Any]
    up: tuple[str, ...]
    down: str
    computation: dict[str, tuple[Any, ...]]
    epsilon: str
    biases: tuple[str, ...]
    epsilon_default: float


LAYOUTS = {
    "llama": Layout(
        architecture="LlamaForCausalLM",
        ours={"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu"},
        up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        computation={"hidden_act": ("silu", "swish"), "rope_scaling": (None,)},
        epsilon="rms_norm_eps",
        biases=("attention_bias", "mlp_bias"),
        epsilon_default=1e-6,
    ),
    "starcoder2": Layout(
        architecture="Starcoder2ForCausalLM",
        ours={"positions": "rotary", "norm": "layernorm", "activation": "gelu"},
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        computation={
            "hidden_act": ("gelu_pytorch_tanh", "gelu_new"),
            "sliding_window": (None,),
            "rope_scaling": (None,),
        },
        epsilon="norm_epsilon",
        biases=("use_bias",),
        epsilon_default=1e-5,
    ),
}
SIZES = (
    "vocab_size", "max_position_embeddings", "num_hidden_layers", "num_attention_heads", "hidden_size",
    "intermediate_size",
)  # fmt: skip
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
PLAIN_ROPE = ("default", None)


def layout_of(config: GPT2Config) -> str | None:
    """The model_type of the layout that can hold such a model, a name of LAYOUTS; None where none can."""
    for name, layout in LAYOUTS.items():
        same = all(getattr(config, field) == value for field, value in layout.ours.items())
        if same and (config.bias or config.norm == "rmsnorm"):  # Starcoder2's LayerNorm always has its bias
            return name
    return None


def save_llama(
    model: GPT2, folder: str | Path, *, end_of_text: int | None = None, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Writes a decoder for transformers: config.json, generation_config.json and the weights; returns the folder.

    end_of_text: that token's id (None: none). shard_bytes: of a weights file; more weights are several, with an index.
    UserError: a model that neither layout can hold (layout_of). OSError: an unwritable folder.
    """
    config = model.config
    name = layout_of(config)
    if name is None:
        raise UserError(
            f"a model with positions={config.positions}, norm={config.norm} and activation={config.activation} is none "
            f"that transformers' {' or '.join(LAYOUTS)} can hold. Possible: save_weights, flashtrain's own layout."
        )
    layout = LAYOUTS[name]
    tensors: dict[str, Tensor] = {}
    for ours, tensor in model.state_dict().items():
        parts = _their_parts(ours, config, layout)
        if len(parts) == 1:
            tensor = tensor[: parts[0][1]]
        tensors |= dict(zip([part for part, _ in parts], tensor.split([rows for _, rows in parts]), strict=True))
    theta = config.scaled_rope_base
    content = {
        "architectures": [layout.architecture],
        "model_type": name,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.embed,
        "intermediate_size": config.ffn,
        "hidden_act": layout.computation["hidden_act"][0],
        layout.epsilon: EPSILON,
        **dict.fromkeys(layout.biases, config.bias),
        # A rope_factor has raised the base already. Readers before transformers 5 know rope_theta alone.
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": str(model.token_embedding.weight.dtype).removeprefix("torch."),
    }
    return write_folder(folder, content, tensors, end_of_text=end_of_text, shard_bytes=shard_bytes)


def load_llama(folder_or_file: str | Path, *, vocab_rows: int | None = None) -> tuple[GPT2Config, dict[str, Tensor]]:
    """Configuration and state dict for GPT2 from such a folder, as load_gpt2 reads a GPT-2's (see there)."""
    content, tensors = read_folder(folder_or_file)
    name = str(content.get("model_type"))
    layout = LAYOUTS.get(name, LAYOUTS["llama"])
    config = _our_config(content, layout, vocab_rows, folder_or_file)
    if config.tie_embeddings:
        tensors.pop("lm_head.weight", None)  # the table once more
    make = partial(GPT2, config, attention="sdpa")
    return config, converted(tensors, make, lambda name, _: _their_parts(name, config, layout), folder_or_file)


def _our_config(content: dict[str, Any], layout: Layout, vocab_rows: int | None, where: str | Path) -> GPT2Config:
    name = next(name for name, one in LAYOUTS.items() if one is layout)
    content = {layout.epsilon: layout.epsilon_default, **content}
    rope = content.get("rope_parameters") or {}
    if rope.get("rope_type") not in PLAIN_ROPE:
        raise UserError(f"{where}: rope_type={rope['rope_type']} in {CONFIG}: expected default (a rope_theta alone).")
    if "rope_parameters" in content:
        content.pop("rope_scaling", None)  # older files' word for the same
    sizes = read_architecture(content, name, {**layout.computation, layout.epsilon: (EPSILON,)}, SIZES, where)
    heads, embed = sizes["num_attention_heads"], sizes["hidden_size"]
    if content.get("head_dim") not in (None, embed / heads):
        raise UserError(
            f"{where}: head_dim={content['head_dim']} in {CONFIG}: expected hidden_size / num_attention_heads."
        )
    biases = [content.get(entry, layout.ours["norm"] == "layernorm") for entry in layout.biases]
    if any(bias != biases[0] for bias in biases) or (layout.ours["norm"] == "layernorm" and biases != [True]):
        raise UserError(f"{where}: {' and '.join(layout.biases)} in {CONFIG}: expected biases in all layers or none.")
    return GPT2Config(
        vocab_size=sizes["vocab_size"],
        vocab_rows=round_up(sizes["vocab_size"], 64) if vocab_rows is None else vocab_rows,
        context=sizes["max_position_embeddings"],
        layers=sizes["num_hidden_layers"],
        heads=heads,
        kv_heads=content.get("num_key_value_heads") or heads,
        embed=embed,
        ffn=sizes["intermediate_size"],
        **layout.ours,
        bias=biases[0],
        tie_embeddings=content.get("tie_word_embeddings", layout.architecture != "LlamaForCausalLM"),
        rope_base=rope.get("rope_theta", content.get("rope_theta", 10000.0)),
    )


def _their_parts(name: str, config: GPT2Config, layout: Layout) -> list[Part]:
    """Transformers' names of one of our tensors' parts, and the rows of each, in our order of rows."""
    module, kind = name.rsplit(".", 1)
    embed, kv = config.embed, config.kv_heads * config.head_dim
    if module == "final_norm":
        return [(f"model.norm.{kind}", embed)]
    if module in ("token_embedding", "head"):
        their = "lm_head" if module == "head" else "model.embed_tokens"
        return [(f"{their}.{kind}", config.vocab_size)]
    _, layer, rest = module.split(".", 2)
    parts: dict[str, list[Part]] = {
        "attention_norm": [("input_layernorm", embed)],
        "attention.qkv": list(zip(QKV, (embed, kv, kv), strict=True)),
        "attention.output": [("self_attn.o_proj", embed)],
        "feed_forward_norm": [("post_attention_layernorm", embed)],
        "feed_forward.up": [(part, config.ffn) for part in layout.up],
        "feed_forward.down": [(layout.down, embed)],
    }
    return [(f"model.layers.{layer}.{part}.{kind}", rows) for part, rows in parts[rest]]
