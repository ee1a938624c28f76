"""Where the samples of a corpus begin and end: its sentences, its paragraphs, or its documents cut to a length.

T tokens of a document, P pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from flashtrain.data.packing import Spans
from flashtrain.data.token_cache import MappedTokens
from flashtrain.data.tokenizers import Tokenizer

TOKENS_AT_ONCE = 2**22
SENTENCE_ENDS = (".", "!", "?")
CLOSING = "\"'\u201d\u2019\u00bb)]"  # quotes and brackets that may follow a sentence's last mark


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
    tokens: np.ndarray | MappedTokens,
    spans: Spans,
    breaks: TokenBreaks,
    *,
    unit: str,
    longest: int,
    shortest: int = 1,
    end_of_text: int,
) -> Spans:
    """Cut documents into pieces of 1 to `longest` tokens; every token but the ends of text is in exactly one.

    tokens: the token file. spans: the documents in it. unit: "document"; "paragraph": where there is an empty line (two
    line feeds with nothing but white space between); "sentence": there, and where white space follows . ! or ?, quotes
    aside. Within these, what is longer than `longest` is cut there. White space stays with what it follows.
    shortest: a shorter piece is joined to the next of its document (the last one to the one before), unless they are
    together too long. A heading is no sample of its own, that is to say.
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
    if unit == "document":
        return solid[:0]
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
