"""Models whose attention knows nothing of other devices: under
ContextParallelStrategy each must be refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import transformers
from torch import Tensor, nn

import flashtrain
from flashtrain.integrations import register_with_transformers
from flashtrain_kernels import flash_attn_func

VOCABULARY, WIDTH, HEADS = 29, 16, 2


def llama(implementation: str) -> transformers.LlamaForCausalLM:
    """A tiny one on our registered attention, on torch's, or on its own."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation)


class OfTransformers(nn.Module):
    """A whole model of transformers'."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.model = llama(implementation)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


class Mixing(nn.Module):
    """An embedding, (B, S, E) -> (B, S, E) that mixes tokens, and a head; before them, or
    not, shared attention."""

    def __init__(self, mixer: nn.Module, *, shared: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.shared = flashtrain.Attention(WIDTH, HEADS) if shared else nn.Identity()
        self.mixer = mixer
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mixer(self.shared(self.embedding(tokens))))


class LayerOfTransformers(nn.Module):
    """One layer of a transformers model on our attention, without the model that knows
    its tokens' positions."""

    def __init__(self) -> None:
        super().__init__()
        whole = llama(register_with_transformers()).model
        self.attention, self.rotary = whole.layers[0].self_attn, whole.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        angles = self.rotary(x, torch.arange(x.shape[1])[None])
        return self.attention(hidden_states=x, position_embeddings=angles, attention_mask=None)[0]


class ByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.transpose(1, 2), -1) @ x


class Flash(nn.Module):
    """Our kernels' function."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(2, (HEADS, -1))
        return flash_attn_func(q, q, q, causal=True).flatten(2)


class Averaged(nn.Module):
    """No attention at all, and yet tokens see each other; what does it is no
    operator that could be known."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / 7


# Every kind of attention by itself: ATTENTION in tests/models/test_token_probe.py.
UNSHARED: dict[str, Callable[[], nn.Module]] = {
    "a layer of a Llama on our attention": lambda: Mixing(LayerOfTransformers()),
    "a Llama on torch's": partial(OfTransformers, "sdpa"),
    "softmax beside shared attention": lambda: Mixing(ByHand(), shared=True),
    "our kernels beside shared attention": lambda: Mixing(Flash(), shared=True),
    "a mean of earlier tokens beside shared attention": lambda: Mixing(Averaged(), shared=True),
    "no attention": lambda: Mixing(Averaged()),
}
