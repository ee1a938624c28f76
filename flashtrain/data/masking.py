"""Which tokens a masked language model has to find: 15% of each sample, as Devlin et al. 2019 have it.

T tokens of several samples end to end, M masked positions; of a batch N sequences a row may hold, B padded rows, S the
longest of them.
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import numpy as np
from torch import Tensor

from flashtrain.data.keyed_random import hashed, uniform
from flashtrain.data.wordpiece import SpecialTokens


class MaskedBatch(TypedDict, total=False):
    """Samples with some tokens masked, in one of two layouts; the names are those of models.Bert.loss.

    Packed, without padding between: tokens (T,) int64, and cu_seqlens (N + 1,) int32: 0, then where each sample ends,
    the last end repeated. Shapes are the same for every batch; what follows the last end is [PAD] and counts nowhere.
    Padded: tokens (B, S) int64, [PAD] after each sample, and lengths (B,) int64.

    masked (M,) int64: indices of the masked tokens among all tokens, row after row. labels (M,) int64: what stood
    there. Packed, both are filled up, with index 0 and label -100.
    label_count: float32 scalar: the step's labels over its micro-batches on all devices, so that the mean of the
    losses is the mean over the step's labels.
    Plain numbers, which stay on the host: sequences, real_tokens, pairs (the sum of squared lengths), scored (labels).
    """

    tokens: Tensor
    cu_seqlens: Tensor
    lengths: Tensor
    masked: Tensor
    labels: Tensor
    label_count: Tensor
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
    return {name: value for name, value in loss_arguments(batch).items() if name != "label_count"}


MASK_SHARE, RANDOM_SHARE = 0.8, 0.1  # of the chosen tokens: become [MASK], become another token; the rest stays


class Masked(NamedTuple):
    """tokens (T,) int64, some replaced; positions (M,) int64, ascending; labels (M,) int64: what stood there."""

    tokens: np.ndarray
    positions: np.ndarray
    labels: np.ndarray


def masked_count(ordinary: np.ndarray | int, share: float) -> np.ndarray:
    """How many of so many tokens of a sample are chosen: the share, rounded, and at least one where there are any.

    The count follows from the length alone, as in the published preprocessing, so that every device knows how many
    labels a step has without asking.
    """
    tokens = np.asarray(ordinary)
    return np.where(tokens > 0, np.maximum(1, np.floor(share * tokens + 0.5)), 0).astype(np.int64)


def mask_tokens(
    tokens: np.ndarray,
    samples: np.ndarray,
    special: SpecialTokens,
    *,
    keys: tuple[np.ndarray | int, ...],
    share: float = 0.15,
) -> Masked:
    """Choose and replace tokens: of the chosen 80% become [MASK], 10% a random token, 10% stay (Devlin et al. 2019).

    tokens: (T,) integers. samples: (T,), the ordinal of each token's sample, not decreasing. keys: what the choice
    follows from, besides a token's place in its sample: integers or (T,) arrays, such as a seed, each token's epoch and
    its sample's number. [CLS], [SEP] and [PAD] are never chosen.
    """
    tokens = tokens.astype(np.int64)
    index = np.arange(len(tokens))
    first = np.concatenate(([True], samples[1:] != samples[:-1])) if len(tokens) else np.empty(0, dtype=bool)
    place = index - np.maximum.accumulate(np.where(first, index, 0)) if len(tokens) else index
    draws = hashed(*keys, place)
    ordinary = np.flatnonzero((tokens >= special.ordinary_begin) & (tokens < special.ordinary_end))
    # In each sample the tokens with the smallest draws are chosen, as many as its share.
    order = ordinary[np.lexsort((draws[ordinary], samples[ordinary]))]
    _, begins, counts = np.unique(samples[order], return_index=True, return_counts=True)
    rank = np.arange(len(order)) - np.repeat(begins, counts)
    positions = np.sort(order[rank < np.repeat(masked_count(counts, share), counts)])
    labels = tokens[positions]
    kind, draw = uniform(draws[positions], 1), hashed(draws[positions], 2)
    texts = special.ordinary_end - special.ordinary_begin
    other = special.ordinary_begin + (draw % np.uint64(texts)).astype(np.int64)
    replaced = np.where(kind < MASK_SHARE, special.mask, np.where(kind < MASK_SHARE + RANDOM_SHARE, other, labels))
    tokens[positions] = replaced
    return Masked(tokens, positions, labels)
