"""The names of tensors and configuration entries under which transformers stores the
decoders that Decoder can be.

model=gpt2 is transformers' GPT-2, and with rotary positions its Starcoder2; model=llama is its
Llama. The latter two store the matrices of q, k, v (and of gate and value) separately, which
flashtrain's models join into one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flashtrain.integrations.weight_files import Part
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.block import EPSILON
from flashtrain.models.decoder_config import DecoderConfig
from flashtrain.models.layer_spec import mixers

WITH_VOCABULARY = ("token_embedding", "head")  # modules that may have more rows than tokens


class Format(NamedTuple):
    """The format in which transformers stores one kind of decoder: names of tensors and of
    config.json's entries."""

    architecture: str  # transformers' class
    ours: dict[str, Any]  # DecoderConfig's fields with the values that a model of this kind has
    prefix: str  # of all tensors' names but the head's
    layer: str  # the prefix of the names of a layer's tensors
    # For each of our modules, transformers' modules that it joins, in order.
    names: dict[str, tuple[str, ...]]
    sizes: dict[str, str]  # for each size in DecoderConfig, the name of its entry in config.json
    absent: dict[str, Any]  # values to use for entries that config.json leaves out
    # Accepted values of further entries; the first where an entry is missing.
    computation: dict[str, tuple[Any, ...]]
    biases: tuple[str, ...] = ()  # entries of config.json that say whether layers have biases
    # Endings of the names of matrices that are stored as (in, out).
    transposed: tuple[str, ...] = ()
    # Endings of the names of constants in older files, which are not read.
    ignored: tuple[str, ...] = ()
    less_one: bool = False  # whether weights of norms around mixers are stored less 1

    def holds(self, config: DecoderConfig) -> bool:
        """Return whether this format can store a model of this configuration."""
        own = config.plain()
        same = config.alike is not None and all(
            own[field] == value for field, value in self.ours.items()
        )
        return same and ("kv_heads" in self.sizes or own["kv_heads"] == own["heads"])

    def parts(self, name: str, rows: int, config: DecoderConfig) -> list[Part]:
        """Return transformers' tensors whose concatenation along the rows is our tensor `name`,
        such as "blocks.0.attention.qkv.weight", of `rows` rows: (name without self.prefix, number
        of rows) each."""
        module, kind = name.rsplit(".", 1)
        if not module.startswith("blocks."):
            return [
                (
                    f"{self.names[module][0]}.{kind}",
                    config.vocab_size if module in WITH_VOCABULARY else rows,
                )
            ]
        _, layer, rest = module.split(".", 2)
        theirs = self.names[rest]
        attention = mixers(config.layers, AttentionSpec)[0]
        keys = attention.kv_heads * attention.head_dim
        # Of q, k and v; and of the delta rule's inputs.
        heads = attention.heads, attention.heads
        uneven = {3: (config.embed, keys, keys), 4: (config.embed, 3 * config.embed, *heads)}
        each = uneven.get(len(theirs), (rows // len(theirs),) * len(theirs))
        return [
            (f"{self.layer}.{layer}.{part}.{kind}", count)
            for part, count in zip(theirs, each, strict=True)
        ]


ROTARY_NAMES = {
    "token_embedding": ("embed_tokens",),
    "final_norm": ("norm",),
    "head": ("lm_head",),
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": ("self_attn.o_proj",),
    "feed_forward_norm": ("post_attention_layernorm",),
}
ROTARY_SIZES = {
    "vocab_size": "vocab_size",
    "context": "max_position_embeddings",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "embed": "hidden_size",
    "ffn": "intermediate_size",
}

FORMATS = {
    "gpt2": Format(
        architecture="GPT2LMHeadModel",
        ours={"positions": "learned", "norm": "layernorm", "activation": "gelu", "bias": True},
        prefix="transformer.",
        layer="h",
        names={
            "token_embedding": ("wte",),
            "position_embedding": ("wpe",),
            "final_norm": ("ln_f",),
            "head": ("lm_head",),
            "attention_norm": ("ln_1",),
            "attention.qkv": ("attn.c_attn",),
            "attention.output": ("attn.c_proj",),
            "feed_forward_norm": ("ln_2",),
            "feed_forward.up": ("mlp.c_fc",),
            "feed_forward.down": ("mlp.c_proj",),
        },
        sizes={
            "vocab_size": "vocab_size",
            "context": "n_positions",
            "layers": "n_layer",
            "heads": "n_head",
            "embed": "n_embd",
            "ffn": "n_inner",
        },
        absent={"tie_word_embeddings": True},
        computation={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "layer_norm_epsilon": (EPSILON,),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        transposed=(
            "attn.c_attn.weight",
            "attn.c_proj.weight",
            "mlp.c_fc.weight",
            "mlp.c_proj.weight",
        ),
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    "llama": Format(
        architecture="LlamaForCausalLM",
        ours={"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu"},
        prefix="model.",
        layer="layers",
        names={
            **ROTARY_NAMES,
            "feed_forward.up": ("mlp.gate_proj", "mlp.up_proj"),
            "feed_forward.down": ("mlp.down_proj",),
        },
        sizes=ROTARY_SIZES,
        absent={"tie_word_embeddings": False, "rms_norm_eps": 1e-6},
        computation={"hidden_act": ("silu", "swish"), "rms_norm_eps": (EPSILON,)},
        biases=("attention_bias", "mlp_bias"),
    ),
    "starcoder2": Format(
        architecture="Starcoder2ForCausalLM",
        ours={"positions": "rotary", "norm": "layernorm", "activation": "gelu", "bias": True},
        prefix="model.",
        layer="layers",
        names={
            **ROTARY_NAMES,
            "feed_forward.up": ("mlp.c_fc",),
            "feed_forward.down": ("mlp.c_proj",),
        },
        sizes=ROTARY_SIZES,
        absent={"tie_word_embeddings": True},
        computation={
            "hidden_act": ("gelu_pytorch_tanh", "gelu_new"),
            "norm_epsilon": (EPSILON,),
            "use_bias": (True,),
            "sliding_window": (None,),
        },
    ),
}
