"""What a mask costs: how many keys each query sees, and how evenly a layout divides that.

Bm rows of a mask (B, or 1 that all rows share), S sequence, R ranks. Plain numbers on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flashtrain_kernels.masks import HIGH, HIGH2, LOW, LOW2, Mask

if TYPE_CHECKING:
    from flashtrain.distributed.context.layout import Layout


def visible_keys(mask: Mask) -> Tensor:
    """(Bm, Sq) int64: how many keys each query of a mask in sequence order sees, counted from its intervals."""
    rows = mask.queries.to(torch.int64).clamp(0, mask.seqlen_k)
    first = (rows[HIGH] - rows[LOW]).clamp(min=0)
    if rows.shape[0] == 5:
        return first
    second = (rows[HIGH2] - rows[LOW2]).clamp(min=0)
    both = (torch.minimum(rows[HIGH], rows[HIGH2]) - torch.maximum(rows[LOW], rows[LOW2])).clamp(min=0)
    # Where one of the intervals is empty they share nothing, wherever its ends are.
    both = torch.where((first > 0) & (second > 0), both, 0)
    return first + second - both


def attention_work(layout: Layout, costs: Tensor) -> np.ndarray:
    """(R,) int64: the visible pairs of each rank's queries, summed over the rows. costs: from `visible_keys`."""
    real = layout.tokens >= 0
    rows = max(layout.tokens.shape[0], costs.shape[0])
    picked = costs.expand(rows, -1)[:, None].expand(-1, layout.degree, -1)
    work = picked.gather(2, layout.tokens.clamp(min=0).expand(rows, -1, -1))
    return torch.where(real, work, 0).sum((0, 2)).numpy()


def imbalance(work: np.ndarray) -> float:
    """max / mean: how much longer the slowest rank computes than it would under a perfect division; 1 is perfect."""
    mean = float(work.mean())
    return float(work.max()) / mean if mean > 0 else 1.0
