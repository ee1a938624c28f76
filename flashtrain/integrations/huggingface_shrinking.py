"""A small transformers decoder of the same architecture: one layer of each kind, in full width."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from flashtrain.integrations.huggingface_folder import random_weights
from flashtrain.integrations.huggingface_layers import decoder_layers
from flashtrain.integrations.huggingface_specs import EXPERTS, layers_of

VOCABULARY, WINDOW = 256, 13  # tokens; WINDOW of chunks too
FEED_FORWARD, MOST_EXPERTS = 128, 4  # which mix no tokens
# Layers that read their part of an embedding, or other layers' keys (Gemma 3n and 4), all stay.
READING_OTHERS = ("hidden_size_per_layer_input", "num_kv_shared_layers")


def shrunk(module: Any) -> Any:
    """Return a transformers decoder like `module`, which may be on the meta device: on the CPU, of
    layers that are alike one, few experts and tokens, short windows, random weights, slow decays.
    """
    config = deepcopy(module.config)
    text = config.get_text_config()
    most = {"vocab_size_per_layer_input": VOCABULARY, "vocab_size": VOCABULARY}
    most |= {"sliding_window": WINDOW, "attention_chunk_size": WINDOW}
    most |= {**dict.fromkeys(EXPERTS, MOST_EXPERTS), "num_experts_per_tok": 2}
    most |= {"n_group": 2, "topk_group": 1}
    for name, value in vars(text).items():
        # A Mamba's intermediate_size is its recurrence's.
        inner = "intermediate_size" in name and not hasattr(text, "state_size")
        if isinstance(value, int) and value > (FEED_FORWARD if inner else most.get(name, value)):
            setattr(text, name, FEED_FORWARD if inner else most[name])
        elif name.endswith("token_id") and isinstance(value, int) and value >= VOCABULARY:
            setattr(text, name, 0)
    names = {"attn_implementation": text._attn_implementation, "experts_implementation": "eager"}
    with torch.device("meta"):
        small = type(module)._from_config(config, dtype=torch.float32, **names)
    _keep_one_of_each(small)
    random_weights(small, decoder_layers(small), torch.device("cpu"))
    for name, one in small.named_parameters():
        last = name.rpartition(".")[2]
        if last in ("A_log", "dt_bias"):
            one.data.uniform_(-2.0, 0.0)
        elif one.dim() > 1 and "embed" not in name:  # so that what mixes tokens matters
            one.data.normal_(0, one[0].numel() ** -0.5)
        elif one.dim() == 1 and "norm" not in name and last != "D":
            one.data.normal_(0, 0.1)
    return small.eval()


def _keep_one_of_each(module: Any) -> None:
    """Leave the first of the layers whose specs and modules are alike."""
    layers, config = decoder_layers(module), module.config.get_text_config()
    if any(getattr(config, name, 0) for name in READING_OTHERS):
        return
    kinds = [f"{spec} {layer}" for spec, layer in zip(layers_of(module), layers, strict=True)]
    kept = [number for number, kind in enumerate(kinds) if kind not in kinds[:number]]
    for one in module.modules():
        for name, child in list(one.named_children()):
            if isinstance(child, nn.ModuleList) and list(child) == layers:
                one.register_module(name, nn.ModuleList(layers[number] for number in kept))
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == len(layers):
            setattr(config, name, [value[number] for number in kept])
    config.num_hidden_layers = len(kept)
    part: Any
    for number, layer in enumerate(kept):
        for part in layers[layer].modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = number
