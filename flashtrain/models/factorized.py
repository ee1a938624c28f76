"""Multi-matrix factorization attention (MFA, Hu et al. 2024, arXiv 2412.19255; Step-3's, arXiv
2507.19427): low-rank queries of H wide heads over one key head. E embedding width.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.models.attention import Attention
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.key_value_cache import LayerCache
from flashtrain.models.mixer import MixerMemory


class FactorizedInputs(nn.Module):
    """The projection to queries norm(x W_down) W_up of `rank`, one key head and one value head;
    `shared`: the keys are the values."""

    def __init__(self, embed: int, heads: int, head_dim: int, rank: int, shared: bool) -> None:
        super().__init__()
        self.rank, self.shared = rank, shared
        self.down = nn.Linear(embed, rank + head_dim * (2 - shared), bias=False)
        self.norm = nn.RMSNorm(rank, eps=1e-5)
        self.up = nn.Linear(rank, heads * head_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute (..., (H + 2) D) from x (..., E): queries, keys, values."""
        latent, keys = self.down(x).tensor_split((self.rank,), dim=-1)
        return torch.cat((self.up(self.norm(latent)), *[keys] * (1 + self.shared)), dim=-1)


@dataclass(frozen=True)
class FactorizedSpec(AttentionSpec):
    """MFA as Step-3 has it, with one head of keys and one of values, or with key reuse."""

    rank: int = 0  # of the queries
    shared: bool = False  # whether the keys are the values, cached once

    kind: ClassVar[str] = "mfa"

    @classmethod
    def of_pattern(cls, value: str | None, attention: AttentionSpec) -> FactorizedSpec:
        sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)(-kr)?", value or "")
        if sizes is None or (sizes[4] and attention.rotary):
            raise UserError(
                f"model.pattern has mfa:{value}. Expected mfa:HEADSxDIMxRANK, such as "
                "mfa:4x256x224; with -kr (keys are values) model.positions=learned alone."
            )
        heads, dim, rank = (int(sizes[number]) for number in (1, 2, 3))
        return cls(heads, 1, dim, rotary=attention.rotary, rank=rank, shared=bool(sizes[4]))

    def make(self, embed: int, **options: Any) -> Attention:
        made: Any = super().make(embed, head_dim=self.head_dim, **options)
        made.qkv = FactorizedInputs(embed, self.heads, self.head_dim, self.rank, self.shared)
        return made

    def new_cache(self, tokens: int) -> LayerCache:
        return LayerCache(tokens, shared=self.shared)

    @property
    def cache_width(self) -> int:
        return self.head_dim * (2 - self.shared)

    def memory(self, **given: Any) -> MixerMemory:
        found = super().memory(**given)
        return found._replace(inputs=found.inputs + 2 * self.rank * given["activation"])
