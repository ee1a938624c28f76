"""What a training or validation step of a masked language model receives.

T packed tokens, N sequences a row may hold, M labels it may have; B padded rows, S the longest of them.
"""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor


class MaskedBatch(TypedDict, total=False):
    """Samples with some tokens masked, in one of two layouts; the names are those of models.Bert.loss.

    Packed, without padding between: tokens (T,) int64, and cu_seqlens (N + 1,) int32: 0, then where each sample ends,
    the last end repeated. Shapes are the same for every batch; what follows the last end is [PAD] and counts nowhere.
    Padded: tokens (B, S) int64, [PAD] after each sample, and lengths (B,) int64.

    segments: int64, as tokens: 0, or 1 for the second piece of a pair; only where there are pairs.
    masked (M,) int64: indices of the masked tokens among all tokens, row after row. labels (M,) int64: what stood
    there. Packed, both are filled up, with index 0 and label -100.
    label_count: float32 scalar: the step's labels over its micro-batches on all devices, so that the mean of the
    losses is the mean over the step's labels.
    next_sentence (N,) or (B,) int64, only with pairs: 0 where the second piece follows the first in the text, 1 where
    it does not, -100 for a single piece. sentence_count: as label_count.
    Plain numbers, which stay on the host: sequences, real_tokens, pairs (the sum of squared lengths), scored (labels).
    """

    tokens: Tensor
    cu_seqlens: Tensor
    lengths: Tensor
    segments: Tensor
    masked: Tensor
    labels: Tensor
    label_count: Tensor
    next_sentence: Tensor
    sentence_count: Tensor
    sequences: int
    real_tokens: int
    pairs: int
    scored: int


NUMBERS = ("sequences", "real_tokens", "pairs", "scored")


def loss_arguments(batch: MaskedBatch) -> dict[str, Tensor]:
    """What models.Bert.loss takes of the batch."""
    return {name: value for name, value in batch.items() if name not in NUMBERS}  # type: ignore[misc]


def score_arguments(batch: MaskedBatch) -> dict[str, Tensor]:
    """What models.Bert.score takes of the batch."""
    left_out = ("label_count", "next_sentence", "sentence_count")
    return {name: value for name, value in loss_arguments(batch).items() if name not in left_out}
