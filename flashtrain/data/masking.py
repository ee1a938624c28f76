"""Choose and mask the tokens that a masked language model predicts: 15% of each
sample (Devlin et al. 2019).

T tokens of several samples end to end, M masked positions, N maximum sequences of a row, B
padded rows of S tokens.
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import numpy as np
from torch import Tensor

from flashtrain.data.keyed_random import hashed, uniform
from flashtrain.data.wordpiece import SpecialTokens

NUMBERS = ("sequences", "real_tokens", "pairs", "scored")  # of a batch: plain numbers
# Of the chosen tokens: become [MASK], become a random token; the rest stays.
MASK_SHARE, RANDOM_SHARE = 0.8, 0.1


class MaskedBatch(TypedDict, total=False):
    """A batch of samples with some tokens masked, packed or padded: arguments of
    models.Bert.loss, and counts.

    Packed batches all have the same shapes.
    """

    tokens: Tensor  # packed (T,) or padded (B, S) int64, filled up with [PAD], which is not scored
    # (N + 1,) int32, of packed samples: 0, then the end of each, the last one repeated.
    cu_seqlens: Tensor
    lengths: Tensor  # (B,) int64, of padded samples
    # (M,) int64, indices of the masked tokens among all tokens; packed batches fill up with 0.
    masked: Tensor
    labels: Tensor  # (M,) int64, the tokens that were masked; packed batches fill up with -100
    label_count: Tensor  # float32 scalar, the step's labels over its micro-batches on all devices
    sequences: int  # samples
    real_tokens: int  # without [PAD]
    pairs: int  # the sum of squared lengths
    scored: int  # labels


def loss_arguments(batch: MaskedBatch) -> dict[str, Tensor]:
    """Return the tensors of a batch that models.Bert.loss takes, by argument."""
    return {name: value for name, value in batch.items() if name not in NUMBERS}  # type: ignore[misc]


def score_arguments(batch: MaskedBatch) -> dict[str, Tensor]:
    """Return the tensors of a batch that models.Bert.score takes, by argument."""
    return {name: value for name, value in loss_arguments(batch).items() if name != "label_count"}


class Masked(NamedTuple):
    """Tokens after masking, with the positions and the original ids of the chosen ones."""

    tokens: np.ndarray  # (T,) int64, some replaced
    positions: np.ndarray  # (M,) int64, of the chosen tokens, ascending
    labels: np.ndarray  # (M,) int64, the tokens that stood there


def masked_count(ordinary: np.ndarray | int, share: float) -> np.ndarray:
    """Count the tokens to mask in each sample: a share of them, rounded, and at least one
    if the sample has any.

    The count follows from the length alone, as in the published preprocessing, so that every device
    knows how many labels a step has without communication.

    Args:
        ordinary: (n,) integers, tokens of each sample that may be chosen.
        share: Share (0 to 1) of them to choose.

    Returns:
        (n,) int64, the number of chosen tokens.
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
    """Choose and replace tokens: of the chosen 80% become [MASK], 10% a random token, 10%
    stay (Devlin et al. 2019).

    Args:
        tokens: (T,) integers.
        samples: (T,) integers, the number of each token's sample, not decreasing.
        special: The special tokens. [CLS], [SEP] and [PAD] are never chosen.
        keys: Random keys, integers or (T,) arrays, such as a seed, each token's epoch and its
            sample's number. The choice follows from them and a token's place in its sample.
        share: Share (0 to 1) of a sample's tokens to choose.
    """
    tokens = tokens.astype(np.int64)
    index = np.arange(len(tokens))
    first = np.ones(len(tokens), dtype=bool)
    first[1:] = samples[1:] != samples[:-1]
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
    replaced = np.where(
        kind < MASK_SHARE, special.mask, np.where(kind < MASK_SHARE + RANDOM_SHARE, other, labels)
    )
    tokens[positions] = replaced
    return Masked(tokens, positions, labels)
