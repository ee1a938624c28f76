"""What a training or validation step receives.

B batch (rows of the micro-batch on this device), S sequence (the context length in tokens).
"""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

IGNORED_LABEL = -100
"""The label of a position that has no target; torch's cross_entropy leaves it out by default."""


class Batch(TypedDict):
    """Packed rows of text, without padding.

    tokens (B, S) int64.
    labels (B, S) int64: the token that follows each position, -100 where there is none to learn.
    documents (B, S) int32: ordinal of the document within its row, from 0, non-decreasing along S.
    positions (B, S) int32: 0 to S-1; with a document mask, counted anew from each document's first token in the row.
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor
    positions: Tensor
