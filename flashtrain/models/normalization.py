"""Which normalisation a model uses, by name: torch's own LayerNorm or RMSNorm over the embedding width E."""

from __future__ import annotations

from torch import nn

from flashtrain.errors import unknown

NORMS = ("layernorm", "rmsnorm")
EPSILON = 1e-5  # GPT-2's


def normalization(norm: str, embed: int, bias: bool, epsilon: float = EPSILON) -> nn.LayerNorm | nn.RMSNorm:
    """The norm of that name (RMSNorm, Zhang and Sennrich 2019, has no bias). UserError: no such norm."""
    if norm == "layernorm":
        return nn.LayerNorm(embed, eps=epsilon, bias=bias)
    if norm == "rmsnorm":
        return nn.RMSNorm(embed, eps=epsilon)
    raise unknown("norm", norm, NORMS)
