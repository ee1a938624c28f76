"""Count the attention that each rank computes: the pairs of a query and a key that the query sees.

Shapes: Bm rows of a mask (B, or 1 that all rows share), S sequence, R ranks (the degree).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flashtrain.distributed.context.layout import Layout
from flashtrain_kernels.masks import HIGH, HIGH2, LOW, LOW2, Mask


def visible_keys(mask: Mask) -> Tensor:
    """Return how many keys each query sees, (Bm, S) int64, from the mask of a whole sequence."""
    rows = mask.queries.to(torch.int64).clamp(0, mask.seqlen_k)
    first = (rows[HIGH] - rows[LOW]).clamp(min=0)
    if rows.shape[0] == 5:
        return first
    second = (rows[HIGH2] - rows[LOW2]).clamp(min=0)
    both = (torch.minimum(rows[HIGH], rows[HIGH2]) - torch.maximum(rows[LOW], rows[LOW2])).clamp(
        min=0
    )
    # Where one of the intervals is empty they share nothing, wherever its ends are.
    both = torch.where((first > 0) & (second > 0), both, 0)
    return first + second - both


def attention_work(layout: Layout, costs: Tensor) -> np.ndarray:
    """Return the work of each rank, (R,) int64: its pairs of a query and a visible
    key, summed over the rows.

    Args:
        layout: which rank holds which tokens.
        costs: the number of keys that each query sees, (Bm, S), from `visible_keys`.
    """
    real = layout.tokens >= 0
    rows = max(layout.tokens.shape[0], costs.shape[0])
    picked = costs.expand(rows, -1)[:, None].expand(-1, layout.degree, -1)
    work = picked.gather(2, layout.tokens.clamp(min=0).expand(rows, -1, -1))
    return torch.where(real, work, 0).sum((0, 2)).numpy()


def imbalance(work: np.ndarray) -> float:
    """Return the largest work of a rank divided by the mean work; 1 is a perfect partition."""
    mean = float(work.mean())
    return float(work.max()) / mean if mean > 0 else 1.0
