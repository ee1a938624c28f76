"""Tiny transformers models of many kinds, with random weights: what the tests of the
attention integration run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import transformers
from torch import Tensor

from flashtrain.integrations import register_with_transformers

VOCABULARY = 61
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
LLAMA_LIKE = {**_SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 1}
_ALTERNATING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
_CHUNKS = {"attention_chunk_size": 5, "no_rope_layers": [1, 0], "interleave_moe_layer_step": 2}
_CAPS = {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4}
_LOCAL = {"num_hidden_layers": 3, "local_attention": 8, "global_attn_every_n_layers": 2}


def _config(kind: str, **sizes) -> Callable[..., transformers.PretrainedConfig]:
    """What makes its configuration, of these sizes and what a test changes;
    generation ends nowhere."""
    return partial(transformers.AutoConfig.for_model, kind, **sizes)


def _like_llama(kind: str, **sizes) -> Callable[..., transformers.PretrainedConfig]:
    return _config(kind, **{**LLAMA_LIKE, "eos_token_id": None, **sizes})


def _of_two_heads(kind: str, **sizes) -> Callable[..., transformers.PretrainedConfig]:
    return _config(kind, **{**_SIZES, "num_attention_heads": 2, **sizes})


_GPT2 = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
_NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
CAUSAL = {
    "gpt2": _config(
        "gpt2", **_GPT2, **_NO_DROPOUT, bos_token_id=1, eos_token_id=None, pad_token_id=0
    ),
    "llama": _like_llama("llama"),
    "qwen2": _like_llama("qwen2", use_sliding_window=True, **_ALTERNATING),
    "qwen3": _like_llama("qwen3", head_dim=12, use_sliding_window=True, **_ALTERNATING),
    "gemma2": _like_llama("gemma2", head_dim=8, **_ALTERNATING, **_CAPS),
    "gpt_oss": _like_llama("gpt_oss", **_EXPERTS, **_ALTERNATING),
}
# What is trained through model=huggingface beside those.
DECODERS = {
    **CAUSAL,
    "mistral": _like_llama("mistral", sliding_window=5),
    "gemma3": _like_llama("gemma3_text", head_dim=8, **_ALTERNATING, query_pre_attn_scalar=4),
    "olmo2": _like_llama("olmo2"),
    "llama4_text": _like_llama("llama4_text", **_EXPERTS, intermediate_size_mlp=48, **_CHUNKS),
}
# These use the registered attention since transformers 5.24.
_ROTARY = {
    **_GPT2,
    **_NO_DROPOUT,
    "n_head": 4,
    "n_ctx": 64,
    "rotary_dim": 4,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LATER = {
    name: _config(name, **_ROTARY, pad_token_id=0)
    for name, model in (
        ("codegen", transformers.CodeGenForCausalLM),
        ("gptj", transformers.GPTJForCausalLM),
    )
    if model._supports_attention_backend
}
# Layers with heads of their own kind, and layers that read the keys of others.
OTHER_LAYERS = {
    "mimo": _like_llama(
        "mimo_v2_flash", **_ALTERNATING, num_key_value_heads=1, head_dim=8, v_head_dim=4,
        moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
    ),
    "gemma4": _like_llama(
        "gemma4_text", num_hidden_layers=4, num_kv_shared_layers=2, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 2, head_dim=8, global_head_dim=16,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY,
    ),
}  # fmt: skip
_ENDS = dict.fromkeys(("eos_token_id", "cls_token_id", "sep_token_id"), 1)
BIDIRECTIONAL = {
    "bert": _of_two_heads("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "modernbert": _of_two_heads("modernbert", **{**_LOCAL, **_ENDS}),
}
KINDS = {**DECODERS, **LATER, **BIDIRECTIONAL}
ALL = {**KINDS, **OTHER_LAYERS}


def build(
    kind: str, implementation: str, dtype: torch.dtype = torch.float32, **changes
) -> transformers.PreTrainedModel:
    """The same model each time but for its attention; parameters with ordinary values, so
    that attention matters."""
    torch.manual_seed(0)
    auto = (
        transformers.AutoModelForMaskedLM
        if kind in BIDIRECTIONAL
        else transformers.AutoModelForCausalLM
    )
    model = auto.from_config(ALL[kind](**changes), attn_implementation=implementation).to(
        torch.float64
    )
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter) + (1.0 if parameter.dim() == 1 else 0.0)
    return model.to(dtype).eval()


def pair(kind: str, dtype: torch.dtype = torch.float32, **changes):
    """(ours, eager): the same model with our attention and with transformers' eager one."""
    ours = build(kind, register_with_transformers(), dtype, **changes)
    return ours, build(kind, "eager", dtype, **changes)


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(
        2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed)
    )


def padding(length: int, real: list[int], side: str) -> Tensor:
    """(B, length) of 1 for real tokens: `real` of them in each row, with the
    padding on one side."""
    index = torch.arange(length)[None]
    count = torch.tensor(real)[:, None]
    return (index < count if side == "right" else index >= length - count).long()


def positions(lengths: list[int]) -> Tensor:
    """(1, S): what a packed row of documents of these lengths gives as position_ids."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


def logits_and_gradients(
    model, ids: Tensor, real: Tensor | None = None, **inputs
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits at the real tokens (n, vocabulary), and the gradients of a random sum of them."""
    model.zero_grad()
    logits = model(ids, **inputs).logits
    kept = logits[real.bool()] if real is not None else logits.flatten(0, 1)
    weights = torch.randn(
        kept.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    (kept * weights.to(kept)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return kept.detach(), gradients


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest error of a gradient, relative to the largest entry of that parameter's gradient.

    Some gradients are zero but for rounding (a key's bias moves all scores of a row alike): for
    those, relative to a hundredth of the largest entry of all.
    """
    floor = 0.01 * max(gradient.abs().max() for gradient in theirs.values())
    ratios = []
    for name, gradient in theirs.items():
        scale = torch.maximum(gradient.abs().max(), floor)
        ratios.append((ours[name].to(gradient) - gradient).abs().max() / scale)
    return torch.stack(ratios).max().item()  # a NaN stays one
