"""What a step of sequence classification receives.

B samples of the micro-batch on this device, S tokens of the longest of them.
"""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor


class Labelled(TypedDict):
    """What every batch has; see SequenceBatch."""

    tokens: Tensor
    labels: Tensor


class SequenceBatch(Labelled, total=False):
    """tokens (B, S), or (B, 2, S) where a sample is two sequences: uint8 grey levels, or token numbers, 0 for padding.

    labels (B,) int64. lengths (B,) or (B, 2) int64: tokens before the padding; absent where all are S long.
    """

    lengths: Tensor
