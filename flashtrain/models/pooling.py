"""From the states of a sequence to one vector: mean, max or attention pooling, blind to padding.

Shapes: B batch, S sequence, E embedding width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashtrain.errors import unknown

POOLINGS = ("mean", "max", "attention")


class Pooling(nn.Module):
    """kind: "mean", "max" (each of the E values by itself), or "attention": a softmax over the tokens of their product
    with one learned vector weighs them (Lin et al. 2017, arXiv 1703.03130, with one hop). UserError: another kind."""

    def __init__(self, kind: str, embed: int) -> None:
        super().__init__()
        if kind not in POOLINGS:
            raise unknown("pooling", kind, POOLINGS)
        self.kind = kind
        self.score = nn.Linear(embed, 1, bias=False) if kind == "attention" else None

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """x (B, S, E) -> (B, E). real: (B, S) bool, False where a row is padded; each row has a token at least."""
        if self.kind == "max":
            if real is not None:
                x = x.masked_fill(~real[..., None], torch.finfo(x.dtype).min)
            return x.max(dim=1).values  # amax's backward compares, see token_pooling.py
        if self.score is not None:
            scores = self.score(x).float() if x.dtype != torch.float64 else self.score(x)
            if real is not None:
                scores = scores.masked_fill(~real[..., None], -torch.inf)
            weights = torch.softmax(scores, dim=1).to(x.dtype)
        elif real is not None:
            weights = real[..., None].to(x.dtype) / real.sum(dim=1)[:, None, None]
        else:
            return x.mean(dim=1)
        if real is not None:
            x = x.masked_fill(~real[..., None], 0.0)
        return (weights * x).sum(dim=1)

    def extra_repr(self) -> str:
        return self.kind
