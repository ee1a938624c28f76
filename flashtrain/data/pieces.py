"""Split documents into pieces: sentences, paragraphs, or whole documents, cut to a length.

T tokens of the token file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from flashtrain.data.packing import Spans
from flashtrain.data.token_cache import MappedTokens
from flashtrain.data.tokenizers import Tokenizer

TOKENS_CHUNK = 2**22
SENTENCE_ENDS = (".", "!", "?")
CLOSING = "\"'\u201d\u2019\u00bb)]"  # quotes and brackets that may follow the end of a sentence


class TokenBreaks(NamedTuple):
    """Properties of tokens that decide where a text may be cut; each field is an
    array indexed by token id."""

    blank: np.ndarray  # the token is white space only
    before: np.ndarray  # line feeds in the white space at its beginning
    after: np.ndarray  # line feeds in the white space at its end; all of those of a blank token
    spaced: np.ndarray  # it begins with white space
    ends: np.ndarray  # it ends a sentence, with . ! or ? and closing quotes

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenBreaks:
        """Compute the properties of all tokens of a tokenizer from their texts."""
        texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
        blank = np.array([not text.strip() for text in texts])
        before = np.array([text[: len(text) - len(text.lstrip())].count("\n") for text in texts])
        after = np.array([text[len(text.rstrip()) :].count("\n") for text in texts])
        return cls(
            blank=blank,
            before=np.where(blank, 0, before),
            after=after,
            spaced=np.array([text[:1].isspace() for text in texts]),
            ends=np.array(
                [text.rstrip().rstrip(CLOSING).endswith(SENTENCE_ENDS) for text in texts]
            ),
        )


def split_pieces(
    tokens: np.ndarray | MappedTokens,
    spans: Spans,
    breaks: TokenBreaks,
    *,
    unit: str,
    longest: int,
    shortest: int = 1,
    end_of_text: int,
) -> Spans:
    """Cut documents into pieces. Every token except the end-of-text tokens
    lies in exactly one piece.

    White space stays with the text before it.

    Args:
        tokens: (T,) integers, the token file.
        spans: The documents in it.
        breaks: Properties of the tokens of the vocabulary.
        unit: "document"; "paragraph": cut at empty lines (two line feeds with only white
            space between them); "sentence": cut there and where white space follows . !
            or ? and closing quotes.
        longest: Tokens of the longest piece; a longer unit is cut.
        shortest: A piece with fewer tokens, such as a heading, is joined to the next of its
            document (the last piece to the one before), unless together they are too long.
        end_of_text: Id of the token that ends documents.

    Returns:
        The pieces as ranges of the token file.
    """
    pieces: list[tuple[int, int]] = []
    for first, last in _groups(spans):
        low, high = int(spans.begins[first]), int(spans.ends[last - 1])
        starts = low + _starts(np.asarray(tokens[low:high]), breaks, unit)
        for document in range(first, last):
            begin, end = int(spans.begins[document]), int(spans.ends[document])
            if end > begin and tokens[end - 1 : end][0] == end_of_text:
                end -= 1
            if end > begin:
                inner = starts[slice(*np.searchsorted(starts, (begin + 1, end)))].tolist()
                pieces += _cut(_joined([begin, *inner, end], shortest, longest), longest, shortest)
    return Spans(*np.array(pieces, dtype=np.int64).reshape(-1, 2).T)


def _groups(spans: Spans) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) document numbers of groups of documents that are neighbors in the
    file, about TOKENS_CHUNK tokens each."""
    first = 0
    for document in range(1, len(spans.begins) + 1):
        apart = document < len(spans.begins) and spans.begins[document] != spans.ends[document - 1]
        if (
            document == len(spans.begins)
            or apart
            or spans.ends[document] - spans.begins[first] > TOKENS_CHUNK
        ):
            yield first, document
            first = document


def _starts(tokens: np.ndarray, breaks: TokenBreaks, unit: str) -> np.ndarray:
    """Return the sorted indices of the tokens that begin a paragraph or sentence; no such token is
    white space alone."""
    solid = np.flatnonzero(~breaks.blank[tokens])
    if unit == "document":
        return solid[:0]
    before, after = solid[:-1], solid[1:]
    # Line feeds between two solid tokens: those of blank tokens in between, and those at
    # the ends of the two.
    alone = np.concatenate(([0], np.where(breaks.blank[tokens], breaks.after[tokens], 0).cumsum()))
    feeds = (
        alone[after]
        - alone[before + 1]
        + breaks.after[tokens[before]]
        + breaks.before[tokens[after]]
    )
    starting = feeds >= 2
    if unit == "sentence":
        starting |= breaks.ends[tokens[before]] & (
            breaks.spaced[tokens[after]] | (after > before + 1)
        )
    return after[starting]


def _joined(bounds: list[int], shortest: int, longest: int) -> list[tuple[int, int]]:
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
    """Yield the ranges, cut to at most `longest` tokens; if the last part of a range would have
    fewer than `shortest` tokens, its last two parts are made equal."""
    for begin, end in ranges:
        while end - begin > longest:
            size = longest
            if longest < end - begin < longest + shortest:
                size = (end - begin) // 2
            yield begin, begin + size
            begin += size
        yield begin, end
