"""Tiny transformers models of many kinds, with random weights: what the tests of the attention integration run."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor

from flashtrain.integrations import register_with_transformers

VOCABULARY = 61
_LLAMA_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_ALTERNATING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}


def gpt2(**changes) -> transformers.GPT2Config:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    return transformers.GPT2Config(**{**sizes, **no_dropout, **ends, **changes})


def bert(**changes) -> transformers.BertConfig:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    rest = {"intermediate_size": 48, "max_position_embeddings": 64}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertConfig(**{**sizes, **rest, **no_dropout, **changes})


def modernbert(**changes) -> transformers.ModernBertConfig:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    rest = {
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
    }
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    return transformers.ModernBertConfig(**{**sizes, **rest, **tokens, "pad_token_id": 0, **changes})


def llama(**changes) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**{**_LLAMA_LIKE, **changes})


def qwen2(**changes) -> transformers.Qwen2Config:
    return transformers.Qwen2Config(**{**_LLAMA_LIKE, "use_sliding_window": True, **_ALTERNATING, **changes})


def qwen3(**changes) -> transformers.Qwen3Config:
    return transformers.Qwen3Config(
        **{**_LLAMA_LIKE, "head_dim": 12, "use_sliding_window": True, **_ALTERNATING, **changes}
    )


def gemma2(**changes) -> transformers.Gemma2Config:
    caps = {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4}
    return transformers.Gemma2Config(**{**_LLAMA_LIKE, "head_dim": 8, **_ALTERNATING, **caps, **changes})


def gpt_oss(**changes) -> transformers.GptOssConfig:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    return transformers.GptOssConfig(**{**_LLAMA_LIKE, **experts, **_ALTERNATING, **changes})


def mistral(**changes) -> transformers.MistralConfig:
    return transformers.MistralConfig(**{**_LLAMA_LIKE, "sliding_window": 5, **changes})


def gemma3(**changes) -> transformers.Gemma3TextConfig:
    return transformers.Gemma3TextConfig(
        **{**_LLAMA_LIKE, "head_dim": 8, **_ALTERNATING, "query_pre_attn_scalar": 4, **changes}
    )


def olmo2(**changes) -> transformers.Olmo2Config:
    return transformers.Olmo2Config(**{**_LLAMA_LIKE, **changes})


def llama4_text(**changes) -> transformers.Llama4TextConfig:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "intermediate_size_mlp": 48}
    layers = {"attention_chunk_size": 5, "no_rope_layers": [1, 0], "interleave_moe_layer_step": 2}
    return transformers.Llama4TextConfig(**{**_LLAMA_LIKE, **experts, **layers, **changes})


CAUSAL = {
    "gpt2": gpt2,
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gpt_oss": gpt_oss,
}
# What is trained through model=huggingface beside those.
DECODERS = {**CAUSAL, "mistral": mistral, "gemma3": gemma3, "olmo2": olmo2, "llama4_text": llama4_text}
BIDIRECTIONAL = {"bert": bert, "modernbert": modernbert}
KINDS = {**DECODERS, **BIDIRECTIONAL}


def build(
    kind: str, implementation: str, dtype: torch.dtype = torch.float32, **changes
) -> transformers.PreTrainedModel:
    """The same model each time but for its attention; parameters with ordinary values, so that attention matters."""
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM if kind in DECODERS else transformers.AutoModelForMaskedLM
    model = auto.from_config(KINDS[kind](**changes), attn_implementation=implementation).to(torch.float64)
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter) + (1.0 if parameter.dim() == 1 else 0.0)
    return model.to(dtype).eval()


def pair(kind: str, dtype: torch.dtype = torch.float32, **changes):
    """(ours, eager): the same model with our attention and with transformers' eager one."""
    ours = build(kind, register_with_transformers(), dtype, **changes)
    return ours, build(kind, "eager", dtype, **changes)


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(length: int, real: list[int], side: str) -> Tensor:
    """(B, length) of 1 for real tokens: `real` of them in each row, with the padding on one side."""
    index = torch.arange(length)[None]
    count = torch.tensor(real)[:, None]
    return (index < count if side == "right" else index >= length - count).long()


def positions(lengths: list[int]) -> Tensor:
    """(1, S): what a packed row of documents of these lengths gives as position_ids."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


def logits_and_gradients(model, ids: Tensor, real: Tensor | None = None, **inputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits at the real tokens (n, vocabulary), and the gradients of a random sum of them."""
    model.zero_grad()
    logits = model(ids, **inputs).logits
    kept = logits[real.bool()] if real is not None else logits.flatten(0, 1)
    weights = torch.randn(kept.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (kept * weights.to(kept)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return kept.detach(), gradients


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest error of a gradient, relative to the largest entry of that parameter's gradient.

    Some gradients are zero but for rounding (a key's bias moves all scores of a row alike): for those, relative to a
    hundredth of the largest entry of all.
    """
    floor = 0.01 * max(gradient.abs().max() for gradient in theirs.values())
    ratios = []
    for name, gradient in theirs.items():
        scale = torch.maximum(gradient.abs().max(), floor)
        ratios.append((ours[name].to(gradient) - gradient).abs().max() / scale)
    return torch.stack(ratios).max().item()  # a NaN stays one
