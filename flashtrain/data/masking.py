"""Masked samples: pieces of text, which tokens are hidden, and the batch they make.

Random numbers that follow from their keys alone: the same on every machine, in any order, for any part of a batch.

A generator with a state would have to be seeded anew for each sample; this is an expression over arrays. The mixing
step is SplitMix64's (Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators").

Where the samples of a corpus begin and end: its sentences, its paragraphs, or its documents cut to a length.

T tokens of a document, P pieces.

What a training or validation step of a masked language model receives.

T packed tokens, N sequences a row may hold, M labels it may have; B padded rows, S the longest of them.

Which tokens a masked language model has to find: 15% of each sample, as Devlin et al. 2019 have it.

T tokens of several samples end to end, M masked positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypedDict

import numpy as np
from torch import Tensor

from flashtrain.data.packing import Spans
from flashtrain.data.tokenizers import Tokenizer
from flashtrain.data.wordpiece import SpecialTokens

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def hashed(*keys: int | np.ndarray) -> np.ndarray:
    """Uniform uint64 from one or more keys (integers of 0 or more, or arrays of them that broadcast)."""
    state = np.zeros(np.broadcast_shapes(*(np.shape(key) for key in keys)), dtype=np.uint64)
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is what is meant
        for key in keys:
            state = _mixed(state + _GOLDEN * (np.asarray(key).astype(np.uint64) + np.uint64(1)))
    return state


def uniform(*keys: int | np.ndarray) -> np.ndarray:
    """Uniform float64 in [0, 1) from the keys, multiples of 2^-53."""
    return (hashed(*keys) >> np.uint64(11)) * 2.0**-53


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


TOKENS_AT_ONCE = 2**22
SENTENCE_ENDS = (".", "!", "?")
CLOSING = "\"'\u201d\u2019\u00bb)]"  # quotes and brackets that may follow a sentence's last mark


class Pieces(NamedTuple):
    """Ranges of the token file, in file order; all (P,) int64. documents: the ordinal of each one's document."""

    begins: np.ndarray
    ends: np.ndarray
    documents: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return self.ends - self.begins


class TokenBreaks(NamedTuple):
    """What each token id says of where a text breaks; all (vocabulary,).

    blank: white space only. before, after: line feeds in the white space that it begins and ends with (a blank one's
    are all in `after`). spaced: begins with white space. ends: ends a sentence, by . ! or ? and closing quotes.
    """

    blank: np.ndarray
    before: np.ndarray
    after: np.ndarray
    spaced: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenBreaks:
        """Read from the text of every token."""
        texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
        blank = np.array([not text.strip() for text in texts])
        before = np.array([text[: len(text) - len(text.lstrip())].count("\n") for text in texts])
        after = np.array([text[len(text.rstrip()) :].count("\n") for text in texts])
        return cls(
            blank=blank,
            before=np.where(blank, 0, before),
            after=after,
            spaced=np.array([text[:1].isspace() for text in texts]),
            ends=np.array([text.rstrip().rstrip(CLOSING).endswith(SENTENCE_ENDS) for text in texts]),
        )


def split_pieces(
    tokens: np.ndarray,
    spans: Spans,
    breaks: TokenBreaks,
    *,
    unit: str,
    longest: int,
    shortest: int = 1,
    end_of_text: int | None = None,
) -> Pieces:
    """Cut documents into pieces of 1 to `longest` tokens; every token but the ends of text is in exactly one.

    tokens: the token file. spans: the documents in it. unit: "document"; "paragraph": where there is an empty line (two
    line feeds with nothing but white space between); "sentence": there, and where white space follows . ! or ?, quotes
    aside. Within these, what is longer than `longest` is cut there. White space stays with what it follows.
    shortest: a shorter piece is joined to the next of its document (the last one to the one before), unless they are
    together too long. A heading is no sample of its own, that is to say.
    """
    begins: list[int] = []
    ends: list[int] = []
    documents: list[int] = []
    for first, last in _groups(spans):
        low, high = int(spans.begins[first]), int(spans.ends[last - 1])
        starts = None
        if unit != "document":
            starts = low + _starts(np.asarray(tokens[low:high]), breaks, unit)
        for document in range(first, last):
            begin, end = int(spans.begins[document]), int(spans.ends[document])
            if end > begin and end_of_text is not None and tokens[end - 1 : end][0] == end_of_text:
                end -= 1
            if end <= begin:
                continue
            inner: list[int] = []
            if starts is not None:
                from_, to = np.searchsorted(starts, (begin + 1, end))
                inner = starts[from_:to].tolist()
            for piece_begin, piece_end in _cut(_joined([begin, *inner, end], shortest, longest), longest, shortest):
                begins.append(piece_begin)
                ends.append(piece_end)
                documents.append(document)
    return Pieces(*(np.array(x, dtype=np.int64) for x in (begins, ends, documents)))


def _groups(spans: Spans) -> Iterator[tuple[int, int]]:
    """Runs of documents that are neighbours in the file, of about TOKENS_AT_ONCE tokens."""
    first = 0
    for document in range(1, len(spans.begins) + 1):
        apart = document < len(spans.begins) and spans.begins[document] != spans.ends[document - 1]
        if document == len(spans.begins) or apart or spans.ends[document] - spans.begins[first] > TOKENS_AT_ONCE:
            yield first, document
            first = document


def _starts(tokens: np.ndarray, breaks: TokenBreaks, unit: str) -> np.ndarray:
    """Where a paragraph or sentence begins in tokens (T,): sorted indices of tokens that are not blank."""
    solid = np.flatnonzero(~breaks.blank[tokens])
    if len(solid) < 2:
        return np.empty(0, dtype=np.int64)
    before, after = solid[:-1], solid[1:]
    # Line feeds up to each token, counting those that stand alone; then those that the two neighbours bring along.
    alone = np.concatenate(([0], np.where(breaks.blank[tokens], breaks.after[tokens], 0).cumsum()))
    feeds = alone[after] - alone[before + 1] + breaks.after[tokens[before]] + breaks.before[tokens[after]]
    starting = feeds >= 2
    if unit == "sentence":
        starting |= breaks.ends[tokens[before]] & (breaks.spaced[tokens[after]] | (after > before + 1))
    return after[starting]


def _joined(bounds: list[int], shortest: int, longest: int) -> list[tuple[int, int]]:
    """Neighbouring bounds as ranges, short ones joined."""
    ranges: list[tuple[int, int]] = []
    begin = bounds[0]
    for end, following in zip(bounds[1:], [*bounds[2:], None], strict=True):
        if end - begin >= shortest or following is None or following - begin > longest:
            ranges.append((begin, end))
            begin = end
    if len(ranges) > 1:
        (begin, middle), (_, end) = ranges[-2:]
        if end - middle < shortest and end - begin <= longest:
            ranges[-2:] = [(begin, end)]
    return ranges


def _cut(ranges: list[tuple[int, int]], longest: int, shortest: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `longest`; the last two of a long one share what they have where the last would be short."""
    for begin, end in ranges:
        while end - begin > longest:
            size = longest
            if longest < end - begin < longest + shortest:
                size = (end - begin) // 2
            yield begin, begin + size
            begin += size
        yield begin, end


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
