"""Grouped-query attention whose query heads are given to key heads by the keys' norms: KDGQA and
DGQA (Khan et al. 2024, arXiv 2408.08454).

A key head's norm is that of its rows of the projection, not of a batch's keys: a causal model must
not see later tokens in it, and a cache must not change it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.models.attention import Attention
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.mixer import MixerMemory


def heads_by_norms(norms: Tensor, heads: int) -> Tensor:
    """Return the key head of each query head, (H,) int64 ascending: their numbers are the shares of
    the norms (K,), rounded by the largest remainders."""
    shares = norms * (heads / norms.sum())
    counts = shares.floor()
    rank = (shares - counts).argsort(descending=True, stable=True).argsort()
    past = (counts + (rank < heads - counts.sum())).long().cumsum(0)
    return torch.searchsorted(past, torch.arange(heads, device=norms.device), right=True)


class KeyNorms(nn.Module):
    """The map from H query heads to the key heads (K, D, E) of now: heads_by_norms of their norms
    or, with a `decay`, of the norms' moving average over the training steps."""

    norms: Tensor  # (2, K): the moving average, and the norms of the latest weights

    def __init__(self, heads: int, kv_heads: int, decay: float) -> None:
        super().__init__()
        self.heads, self.decay = heads, decay
        if decay:
            self.register_buffer("norms", torch.zeros(2, kv_heads))

    @torch.no_grad()
    def forward(self, keys: Tensor) -> Tensor:
        norms = keys.float().flatten(1).norm(dim=1)
        if self.decay:
            norms = norms.to(self.norms.dtype)
            average, latest = self.norms
            if self.training:
                # Weights change at a step alone: micro-batches and recomputed layers count once.
                moved = torch.where(latest.any(), norms.lerp(average, self.decay), norms)
                average = torch.where((norms != latest).any(), moved, average)
                self.norms.copy_(torch.stack((average, norms)))
            norms = torch.where(average.any(), average, norms)
        return heads_by_norms(norms, self.heads)


@dataclass(frozen=True)
class KeyDrivenSpec(AttentionSpec):
    """KDGQA, or DGQA with a decay."""

    decay: float = 0.0  # of the norms' moving average over training steps; 0: the norms of now

    kind: ClassVar[str] = "kdgqa"
    crosses_devices: ClassVar[str | None] = None

    @classmethod
    def of_pattern(cls, value: str | None, attention: AttentionSpec) -> KeyDrivenSpec:
        heads, kv_heads = attention.heads, attention.kv_heads
        if re.fullmatch(r"(0?\.\d+)?", value or "") is None or heads == kv_heads:
            raise UserError(
                f"model.pattern has kdgqa:{value}, with model.kv_heads={kv_heads} of {heads} heads."
                " Expected kdgqa, or kdgqa:0.99 (DGQA), and fewer key heads."
            )
        sizes = heads, kv_heads, attention.head_dim
        return cls(*sizes, rotary=attention.rotary, decay=float(value or 0))

    def make(self, embed: int, **options: Any) -> Attention:
        made = super().make(embed, **options)
        made.head_map = KeyNorms(self.heads, self.kv_heads, self.decay)
        return made

    def memory(self, **given: Any) -> MixerMemory:
        return AttentionSpec.memory(replace(self, kv_heads=self.heads), **given)
