"""What the layers of a transformers decoder are, read from its configuration and its modules
before weights are read.

Only the configuration says how a layer mixes tokens. A model whose configuration says nothing is
probed in the first step in which devices share its sequences (models/token_probe.py).

Letters: D head dimension, F width inside a feed-forward.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from flashtrain.integrations.huggingface_layers import (
    body_of,
    decoder_layers,
    feed_forward_of,
    gated_matrices,
)
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.layer_spec import ExpertsSpec, FeedForwardSpec, LayerSpec
from flashtrain.models.mixer import MixerMemory, MixerSpec
from flashtrain.models.state_spec import CHUNK, StateSizes
from flashtrain.models.trainable import DecoderShape

WINDOWED, CHUNKED = "sliding_attention", "chunked_attention"
# Entries of layer_types that are attention alone.
ATTENTIONS = ("attention", "full_attention", WINDOWED, CHUNKED)
# Those by which a state passes from token to token, alone or beside attention; "mamba" and
# "recurrent" are older names.
STATES = ("linear_attention", "mamba", "recurrent", "conv", "hybrid", "hybrid_sliding")
# layers that are a feed-forward alone, beside which others are a mixer alone.
FEED_FORWARDS = ("mlp", "moe")
GATES = {"gate_proj", "gate_up_proj", "w3"}  # the further matrix of a gated feed-forward
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class OtherSpec:
    """A mixer that transformers makes and that is not attention alone. Its FLOPs and memory
    are unknown, unless a subclass (StateSpec) counts them."""

    kind: str  # its entry in the configuration's layer_types

    any_mask: ClassVar[bool] = False

    @property
    def crosses_devices(self) -> str | None:
        return None

    def make(self, embed: int, **options: Any) -> Any:
        raise NotImplementedError(f"{self.kind}: transformers makes this mixer, not its spec")

    def new_cache(self, tokens: int) -> Any:
        raise NotImplementedError(f"{self.kind}: transformers makes this mixer's cache")

    def flops(self, context: int) -> float:
        return math.nan

    def memory(self, **sizes: Any) -> MixerMemory | None:
        return None


@dataclass(frozen=True)
class StateSpec(StateSizes, OtherSpec):
    """A mixer of one of STATES: a recurrence or a convolution, alone or beside
    attention in the same layer."""

    state: int = 0
    products: int = 0
    inputs: int = 0
    inner: int = 0
    beside: AttentionSpec | None = None
    passed: int | None = None  # None: devices cannot share its sequences
    columns: int = 0

    @property
    def crosses_devices(self) -> str | None:
        return None if self.passed is None else "state"

    def flops(self, context: int) -> float:
        return super().flops(context) + (self.beside.flops(context) if self.beside else 0.0)

    def memory(self, **sizes: Any) -> MixerMemory:
        own = super().memory(**sizes)
        both = (own, self.beside.memory(**sizes)) if self.beside else (own,)
        return MixerMemory(*map(sum, zip(*both, strict=True)))


@dataclass(frozen=True, kw_only=True)
class HuggingFaceShape(DecoderShape):
    """What a transformers decoder is made of; see DecoderShape."""

    vocab_size: int
    context: int
    embed: int
    layers: tuple[LayerSpec, ...]
    vocab_rows: int
    positions: str
    frozen: int
    outside: int
    heads: int
    kv_heads: int
    head_dim: int
    quantized: int = 0

    def plain(self) -> dict[str, Any]:
        """Return plain values that a checkpoint stores, so that loading the checkpoint into
        another model is detected."""
        own = {name: value for name, value in vars(self).items() if name != "layers"}
        return {
            **own,
            "layers": len(self.layers),
            "activation": self.layers[-1].feed_forward.activation,
        }


def shape_of(module: Any) -> HuggingFaceShape:
    """Return what a transformers decoder is made of."""
    config, layers = module.config.get_text_config(), decoder_layers(module)
    inside = sum(one.numel() for layer in layers for one in layer.parameters())
    heads = heads_of(config)
    return HuggingFaceShape(
        vocab_size=config.vocab_size,
        context=getattr(config, "max_position_embeddings", None) or 2**31 - 1,
        embed=config.hidden_size,
        layers=layers_of(module),
        vocab_rows=module.get_output_embeddings().weight.shape[0],
        positions="learned" if learned_positions(module) is not None else "rotary",
        frozen=sum(one.numel() for one in module.parameters() if not one.requires_grad),
        outside=sum(one.numel() for one in module.parameters()) - inside,
        heads=heads,
        kv_heads=max(
            getattr(one, "num_key_value_heads", None) or heads for one in each_config(config, 1)
        ),
        head_dim=head_dim_of(config),
    )


def head_dim_of(config: Any) -> int:
    """Return the dimension of a configuration's heads, the largest where it differs
    between layers (Gemma 4)."""
    return max(
        getattr(one, "head_dim", None) or one.hidden_size // heads_of(one)
        for one in each_config(config, 1)
    )


def heads_of(config: Any) -> int:
    """Return a configuration's number of attention heads; of a model without attention the number
    of the recurrence's heads, or 1 (Mamba)."""
    return getattr(config, "num_attention_heads", None) or int(getattr(config, "num_heads", 1))


def each_config(config: Any, count: int) -> Sequence[Any]:
    """Return the configuration of each of `count` layers: their own ones where
    layers differ (Gemma 4)."""
    return (
        config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * count
    )


def layers_of(module: Any) -> tuple[LayerSpec, ...]:
    """Return what each layer of a transformers decoder is."""
    config, layers = module.config.get_text_config(), decoder_layers(module)
    rotary = learned_positions(module) is None
    # 1: it has rotary positions (SmolLM3).
    rotated = getattr(config, "no_rope_layers", None) or [1] * len(layers)
    # Without layer_types a window is every layer's (Mistral), if the class has windows and the file
    # of a class that it is made from has masks of them; Moshi's has none, and its entry is unread.
    files = (sys.modules.get(one.__module__) for one in type(module).__mro__)
    masks = any(hasattr(file, "create_sliding_window_causal_mask") for file in files)
    one = WINDOWED if masks and hasattr(type(config), "sliding_window") else ATTENTIONS[0]
    kinds = kinds_of(config) or [one] * len(layers)
    apart = any(kind in FEED_FORWARDS for kind in kinds)  # Nemotron-H
    parts = zip(each_config(config, len(layers)), kinds, layers, rotated, strict=True)
    return tuple(
        LayerSpec(
            mixer_of(own, kind, layer, rotary=rotary and bool(rotates)),
            FeedForwardSpec(0)  # a mixer alone, as Mamba's layers are too
            if feed_forward_of(layer) is None and (apart or kind == "linear_attention")
            else feed_forward_spec(own, layer),
            # Norms after attention and feed-forward, alone or besides (OLMo 2, Gemma 2).
            "post" if hasattr(layer, "post_feedforward_layernorm") else "pre",
        )
        for own, kind, layer, rotates in parts
    )


def kinds_of(config: Any) -> Sequence[str]:
    """Return each layer's entry in a configuration's layer_types; [] where it says nothing."""
    # transformers derives them from every model's own fields (attn_layer_indices,
    # hybrid_override_pattern, ...).
    return getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()


def states_of(kind: type, config: Any) -> str:
    """Return in words which layers of a model of this class pass states from token to token, such
    as "linear_attention in 18 of 24 layers"; "" if none do."""
    kinds = kinds_of(config)
    found = [
        f"{one} in {kinds.count(one)} of {len(kinds)} layers"
        for one in dict.fromkeys(kinds)
        if one in STATES
    ]
    # transformers' own mark: where the configuration says nothing (RWKV), or attention keeps
    # states (DeepSeek V4).
    return ", ".join(found) or ("recurrent states" if getattr(kind, "_is_stateful", False) else "")


def mixer_of(config: Any, kind: str, layer: nn.Module, *, rotary: bool) -> MixerSpec:
    """Return the spec of a layer's mixer. kind: the layer's entry in layer_types; rotary: whether
    its queries and keys are rotated."""
    if kind in FEED_FORWARDS:
        return StateSpec(kind, passed=0)
    if kind in STATES:
        both = kind.startswith("hybrid")
        return state_of(
            kind, layer, mixer_of(config, ATTENTIONS[0], layer, rotary=rotary) if both else None
        )
    if kind not in ATTENTIONS:
        return OtherSpec(kind)
    heads = heads_of(config)
    named = {
        name.rpartition(".")[2] for name, _ in (*layer.named_modules(), *layer.named_parameters())
    }
    normed = any("norm" in name and name.startswith(("q", "k")) for name in named)
    # Of multi-head latent attention (DeepSeek), with values of another.
    latent = getattr(config, "qk_head_dim", None)
    head_dim = latent or getattr(config, "head_dim", None) or config.hidden_size // heads
    # MiMo-V2's windowed layers have twice as many as its configuration says.
    keys = [one for name, one in layer.named_modules() if name.endswith("attn.k_proj")]
    made = 0 if latent else getattr(keys[0], "out_features", 0) // head_dim if keys else 0
    attention = AttentionSpec(
        heads,
        made or getattr(config, "num_key_value_heads", None) or heads,
        head_dim,
        value_dim=config.v_head_dim if latent else None,
        rotary=rotary,
        rotated_alone={"q_proj", "k_proj"} <= named and not normed,
    )
    if kind == CHUNKED:
        return replace(attention, chunk=getattr(config, "attention_chunk_size", None))
    if kind == WINDOWED:
        return replace(attention, window=getattr(config, "sliding_window", None))
    return attention


def mixers_with_states(layer: nn.Module) -> list[nn.Module]:
    """Return the modules of a layer that are recurrences or convolutions, by what they have."""
    found = [
        one
        for one in layer.modules()
        if any(isinstance(part, nn.Conv1d) for part in one.children())
    ]
    return found or [one for one in layer.modules() if hasattr(one, "slope_rate")]


def state_of(kind: str, layer: nn.Module, beside: Any) -> MixerSpec:
    """Return the spec of a layer's recurrence or convolution, recognized by the names of its sizes
    in transformers' modules. beside: the spec of attention in the same layer, or None."""
    mixes = mixers_with_states(layer)
    if not mixes:
        return OtherSpec(kind)
    products = state = further = columns = 0
    passed = 0 if kind == "conv" else None
    match vars(mixes[0]):
        case {"num_v_heads": heads, "head_k_dim": keys, "head_v_dim": values}:  # gated delta rule
            products, state, further = 6, heads * keys * values, CHUNK * heads
            passed, columns = heads * keys * (keys + values), heads * keys
        case {"ssm_state_size": size, "num_heads": heads, "head_dim": width}:  # Mamba-2
            products, state = 4, heads * width * size
            # simple_gla has no groups: B and C of every head, and x times the step.
            further = heads * (2 * size + width)
            passed, columns = heads * size * (1 + width), heads * width
        case {"ssm_state_size": size, "intermediate_size": width}:  # Mamba-1
            products, state = 9, width * size
        case {"num_heads": heads, "head_dim": width}:  # Kimi's delta attention
            products, state, further = 6, heads * width**2, 2 * CHUNK * heads
            passed, columns = 2 * heads * width**2, heads * width
        # Lightning attention.
        case {"num_attention_heads": heads, "head_dim": width, "block_size": _}:
            products, state = 4, heads * width**2
    widths = inner = 0
    for name, part in mixes[0].named_modules():
        if (
            name.startswith(("out_proj", "o_proj"))
            and isinstance(part, nn.Linear)
            and "lora_" not in name
        ):
            inner = part.in_features
        elif isinstance(part, nn.Linear | nn.Conv1d):
            widths += part.out_features if isinstance(part, nn.Linear) else part.out_channels
    return StateSpec(kind, state, products, widths + further, inner, beside, passed, columns)


def feed_forward_spec(config: Any, layer: nn.Module) -> FeedForwardSpec:
    """Return what a layer's feed-forward is: dense, or experts where the layer
    has modules of that name."""
    module, names = feed_forward_of(layer), dict(layer.named_modules())
    named = {name.rpartition(".")[2] for name, _ in (*names.items(), *layer.named_parameters())}
    activation = "swiglu" if named & GATES else "gelu"
    by_autograd = module is None or gated_matrices(module) is None
    inner = (
        getattr(config, "intermediate_size", None)
        or getattr(config, "n_inner", None)
        or 4 * config.hidden_size
    )
    top = getattr(config, "num_experts_per_tok", None)
    if not top or not any(
        "experts" in f"{name} {type(one).__name__}".lower() for name, one in names.items()
    ):
        return FeedForwardSpec(inner, activation, by_autograd)
    shared = [
        one.out_features
        for name, one in names.items()
        if "shared" in name
        and name.rpartition(".")[2] in ("up_proj", "w3")
        and isinstance(one, nn.Linear)
    ]
    return ExpertsSpec(
        getattr(config, "moe_intermediate_size", None) or inner,
        activation,
        by_autograd,
        experts=_experts(config),
        top=top,
        shared=sum(shared),
    )


def learned_positions(module: Any) -> Tensor | None:
    """Return a transformers model's table of learned positions; None where positions
    are rotary or computed."""
    tables = [one.weight for one in body_of(module)[1].children() if isinstance(one, nn.Embedding)]
    return next((one for one in tables if one is not module.get_input_embeddings().weight), None)


def flops_per_token(module: Any, length: int) -> float:
    """Return the FLOPs of forward and backward for one token in a sequence of `length`
    tokens, as in Decoder.

    Only the experts that a token is routed to and the keys in each layer's window are counted. A
    frozen matrix counts 4 FLOPs a weight instead of 6, since it has no gradient.
    """
    config = module.config.get_text_config()
    looked_up = {id(module.get_input_embeddings().weight), id(learned_positions(module))}
    looked_up -= {id(module.get_output_embeddings().weight)}
    experts = _experts(config)
    share = (getattr(config, "num_experts_per_tok", None) or experts) / experts
    flops = 0.0
    for name, parameter in module.named_parameters():
        if id(parameter) not in looked_up and parameter.dim() >= 2:
            each = 6.0 if parameter.requires_grad else 4.0
            flops += each * parameter.numel() * (share if ".experts." in name else 1.0)
    return flops + sum(layer.mixer.flops(length) for layer in layers_of(module))


def _experts(config: Any) -> int:
    return next((count for name in EXPERTS if (count := getattr(config, name, None))), 1)
