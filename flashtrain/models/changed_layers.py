"""Trained weights of a decoder in other layers: with fewer key heads, windows, or KDGQA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.decoder_config import DecoderConfig
from flashtrain.models.layer_pattern import layers_of_pattern


def with_layers(
    config: DecoderConfig, state: dict[str, Tensor], kv_heads: int | None, pattern: Sequence[str]
) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Return a trained decoder's configuration and state dict with so many key heads (None: as they
    are) in layers of these mixers ([full]: as they are).

    A key or value head is the mean of those that it replaces (Ainslie et al. 2023, section 2.1).
    """
    if kv_heads is None and list(pattern) == ["full"]:
        return config, state
    if config.alike is None:
        raise UserError("model.kv_heads and model.pattern: the layers of the weights differ.")
    old: AttentionSpec = config.alike.mixer  # type: ignore[assignment]
    attention, state = replace(old, kv_heads=kv_heads or old.kv_heads), dict(state)
    layers = layers_of_pattern(pattern, len(config.layers), attention, config.alike.feed_forward)
    for number, mixer in enumerate(layer.mixer for layer in layers):
        same = isinstance(mixer, AttentionSpec) and mixer.head_dim == old.head_dim
        if not same or old.kv_heads % attention.kv_heads:
            raise UserError(
                f"layers of {mixer.kind} with model.kv_heads={kv_heads}: the weights have "
                f"attention with {old.kv_heads} key heads, which the new number must divide."
            )
        block = f"blocks.{number}."
        for name in [one for one in state if one.startswith(f"{block}attention")]:
            x = state.pop(name)
            if ".qkv." in name:  # rows of queries, keys, values
                queries, rest = x.tensor_split((old.heads * old.head_dim,))
                pooled = rest.unflatten(0, (2, attention.kv_heads, -1, old.head_dim)).mean(2)
                x = torch.cat((queries, pooled.flatten(0, 2)))
            state[name.replace(f"{block}attention", block + mixer.kind)] = x
        if getattr(mixer, "decay", 0):
            state[f"{block}{mixer.kind}.head_map.norms"] = torch.zeros(2, attention.kv_heads)
    return replace(config, layers=layers), state
